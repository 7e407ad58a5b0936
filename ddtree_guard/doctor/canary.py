"""A few greedy prompts to a running server, and a judgement that needs no second server.

Three looks at the same output. Runs of one token and replacement characters are what garbling
looks like. The same prompt alone and among others must say the same. And the oracle: the server
continues each prefix of its own output by one token, which it computes in prefill, without a draft
and without a tree; a sound server finds its own tokens again, except where two were nearly equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddtree_guard.doctor.client import Client, NoAnswer, Refused

COUNT = 48  # tokens per prompt
PREFIXES = 24  # of which so many are asked again
RUN = 16  # equal tokens in a row that are a sign
APART = 0.05  # share of prefixes whose next token differs, above which it is no tie
ENOUGH = 8  # tokens below which an output says nothing
PROMPTS = (
    "The Zen of Python, by Tim Peters\n\nBeautiful is better than",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "Once upon a time, in a small village at the foot of a mountain, there lived",
    "The first ten prime numbers, each on a line of its own, are:\n2\n3\n5\n",
)
REPLACEMENT = "\ufffd"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Output:
    """One answer: token ids where the server tells them, and text where it has a tokenizer."""

    ids: tuple[int, ...] = ()
    text: str = ""
    finish: str = ""


@dataclass
class Canary:
    """What one prompt gave. `again` counts prefixes asked and those that gave another token."""

    prompt: str
    alone: Output
    among: Output
    run: int = 0
    replaced: int = 0
    asked: int = 0
    other: int = 0
    first_other: int | None = None

    @property
    def same(self) -> bool:
        """Whether it said the same alone and among others."""
        if self.alone.ids and self.among.ids:
            return self.alone.ids == self.among.ids
        return self.alone.text == self.among.text


@dataclass
class Judgement:
    """The canaries together. `garbled` None: too little came back to say."""

    canaries: list[Canary] = field(default_factory=list)
    garbled: bool | None = None
    why: list[str] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)
    requests: int = 0

    @property
    def asked(self) -> int:
        """Prefixes that were asked again."""
        return sum(canary.asked for canary in self.canaries)

    @property
    def other(self) -> int:
        """Those that gave another token."""
        return sum(canary.other for canary in self.canaries)


def sing(client: Client, ids_only: bool, prompts: Sequence[str] = PROMPTS) -> Judgement:
    """Send the prompts and judge. Raises NoAnswer where the server does not answer at all.

    `ids_only`: the server has no tokenizer, so prompts are sent as byte values.
    """
    judged = Judgement()
    asked = [_encode(client, prompt, ids_only) for prompt in prompts]
    alone = [_generate(client, [one], COUNT)[0] for one in asked]
    among = _generate(client, asked, COUNT)
    judged.requests = len(alone) + len(among)
    for prompt, one, first, second in zip(prompts, asked, alone, among, strict=True):
        canary = Canary(prompt, first, second)
        canary.run = max(_longest_run(first), _longest_run(second))
        canary.replaced = max(map(_replaced, (first.text, second.text)))
        _ask_again(client, canary, one, judged)
        judged.canaries.append(canary)
    _judge(judged)
    return judged


def _encode(client: Client, prompt: str, ids_only: bool) -> str | list[int]:
    """Token ids where they can be had: prefixes of ids have no seams."""
    if ids_only:
        return list(prompt.encode())
    try:
        found = client.post("/tokenize", {"prompt": prompt})
    except NoAnswer:
        return prompt
    ids = found.get("tokens") if isinstance(found, dict) else None
    return ids if ids and _are_ids(ids) else prompt


def _generate(client: Client, prompts: Sequence[Any], count: int) -> list[Output]:
    """Greedy continuations, all prompts in one request. Raises NoAnswer."""
    texts = [p for p in prompts if isinstance(p, str)]
    whole: Any = {"text": texts} if texts else {"input_ids": list(prompts)}
    if len(prompts) == 1:
        whole = {name: values[0] for name, values in whole.items()}
    params = {"temperature": 0.0, "max_new_tokens": count}
    found = client.post("/generate", {**whole, "sampling_params": params})
    answers = found if isinstance(found, list) else [found]
    if len(answers) != len(prompts) or not all(isinstance(a, dict) for a in answers):
        raise NoAnswer(
            f"{client.address.text}/generate answers {len(prompts)} prompts with something else "
            "than that many outputs; that is not SGLang's /generate."
        )
    return [_output(answer) for answer in answers]


def _output(answer: dict[str, Any]) -> Output:
    ids: Any = answer.get("output_ids")
    text = answer.get("text")
    meta = answer.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    finish = reason.get("type") if isinstance(reason, dict) else reason
    return Output(
        tuple(ids) if _are_ids(ids) else (),
        text if isinstance(text, str) else "",
        str(finish or "")[:40],
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _ask_again(client: Client, canary: Canary, prompt: Any, judged: Judgement) -> None:
    """Compare each next token with what prefill says. The output among others is the one judged:
    a wrong stride hits the second request of a batch before it hits the first.
    """
    ids = canary.among.ids
    if isinstance(prompt, str) or len(ids) < ENOUGH:
        return
    places = list(range(1, min(len(ids), PREFIXES + 1)))
    prefixes = [[*prompt, *ids[:place]] for place in places]
    try:
        answers = _generate(client, prefixes, 1)
    except Refused as error:
        judged.not_judged.append(f"the comparison with prefill: {error}")
        return
    judged.requests += len(prefixes)
    for place, answer in zip(places, answers, strict=True):
        if not answer.ids:
            continue
        canary.asked += 1
        if answer.ids[0] != ids[place]:
            canary.other += 1
            first = canary.first_other
            canary.first_other = place if first is None else min(first, place)


def _longest_run(output: Output) -> int:
    """The longest run of one token, or of one visible character where there are no tokens."""
    if output.ids:
        return _run(output.ids)
    return max((_run(line) for line in output.text.split()), default=0)


def _run(items: Sequence[Any]) -> int:
    longest = length = 0
    before: Any = None
    for item in items:
        length = length + 1 if item == before else 1
        longest, before = max(longest, length), item
    return longest


def _replaced(text: str) -> int:
    """Replacement characters, except those of a last character that is not complete yet."""
    return text.rstrip(REPLACEMENT).count(REPLACEMENT)


def _judge(judged: Judgement) -> None:
    """The oracle decides where it could be asked; the looks decide only where it could not."""
    found = judged.canaries
    aborted = sum(c.among.finish == "abort" for c in found)
    if aborted:
        judged.not_judged.append(f"{aborted} of {len(found)} prompts: the server aborted them")
    enough = [c for c in found if max(len(c.alone.ids), len(c.alone.text) // 4) >= ENOUGH]
    if not enough:
        judged.not_judged.append("the outputs: each is shorter than 8 tokens")
        return
    runs = [c for c in enough if c.run >= RUN]
    replaced = [c for c in enough if c.replaced >= 2]
    differ = [c for c in enough if not c.same]
    if judged.asked >= PREFIXES // 2:
        judged.garbled = judged.other > max(1, APART * judged.asked)
        if judged.garbled:
            judged.why.append(
                f"{judged.other} of {judged.asked} tokens are not what the same server computes "
                "for the same prefix without drafts"
            )
    else:
        judged.not_judged.append("tokens against prefill: the server tells no token ids")
        judged.garbled = bool(runs or replaced) or len(differ) * 2 > len(enough)
    if runs:
        judged.why.append(f"{len(runs)} of {len(enough)} outputs repeat one token {RUN}+ times")
    if replaced:
        judged.why.append(f"{len(replaced)} of {len(enough)} outputs hold replacement characters")
    if differ:
        judged.why.append(
            f"{len(differ)} of {len(enough)} prompts are answered otherwise alone than among others"
        )
