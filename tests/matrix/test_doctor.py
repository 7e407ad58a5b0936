"""The doctor on the release that is installed here: its hooks, its parser, and its predictions."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from ddtree_guard.doctor import examine
from ddtree_guard.doctor.deployment import deployment_of
from ddtree_guard.doctor.document import document, schema
from ddtree_guard.doctor.predict import predict
from ddtree_guard.hooks import boot, inspection, patching, sites
from ddtree_guard.hooks.facts import CLASS, MATRIX, generation_of, release

pytestmark = [pytest.mark.sglang, pytest.mark.matrix, pytest.mark.timeout(600)]

TARGET = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
}  # fmt: skip
DRAFT = {
    **TARGET, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "block_size": 8,
    "num_target_layers": 4, "dflash_config": {"mask_token_id": 999, "target_layer_ids": [1, 2]},
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, config in (("target", TARGET), ("draft", DRAFT)):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An environment in which children find the plugin by its entry point."""
    points = importlib.metadata.entry_points(group="sglang.srt.plugins")
    site = tmp_path_factory.mktemp("site")
    info = site / "ddtree_guard_here-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ddtree-guard-here\nVersion: 0\n")
    target = "ddtree_guard = ddtree_guard.hooks.plugin:load"
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{target}\n")
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    if not [point for point in points if point.name == "ddtree_guard"]:
        paths.insert(0, str(site))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.delenv("SGLANG_PLUGINS", raising=False)
        patch.setenv("SGLANG_DDTREE_GUARD_SHADOW_EVERY", "64")
        yield


@pytest.fixture(scope="module")
def tree(models: Path, installed: None) -> Any:
    """The diagnosis of a tree algorithm's serve arguments, through SGLang's own parser."""
    words = ["--model-path", str(models / "target"), "--attention-backend", "triton"]
    if release() in ("0.5.16", "0.5.17"):
        words += ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "16",
                  "--speculative-draft-model-path", str(models / "draft")]  # fmt: skip
    else:
        words += ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "12"]
    return examine.arguments(words)


def test_the_environment_is_ready_and_its_parts_are_named(tree: Any) -> None:
    survey = tree.survey
    assert survey["ended"] == ""
    assert tree.troubles == []
    assert survey["sglang"]["release"] == release()
    assert survey["sglang"]["tested"] == boot.tested(release())
    assert survey["plugin"]["loaded"]
    assert survey["plugin"]["shadow"].startswith("ddtree_guard shadow every=64 capture=meta")
    guard = [hook for hook in survey["hooks"] if hook["part"] != "DDTREE"]
    assert [hook["detail"] for hook in guard if hook["blocking"]] == []
    assert len(guard) >= 11


def test_the_label_names_the_generation_that_the_class_has(tree: Any) -> None:
    labelled = generation_of(release())
    assert labelled is not None
    assert tree.survey["sglang"]["generation"] == labelled.name


def test_sglangs_own_parser_and_resolver_give_the_widths(tree: Any) -> None:
    d = tree.deployment
    assert tree.survey["arguments"]["status"] == "resolved"
    assert d.backend == "triton"
    assert d.context == 2048
    assert d.lanes == 48  # SGLang's own default with speculation
    assert (d.model.heads, d.model.head_dim, d.model.recurrent) == (4, 64, False)
    if d.ddtree:
        assert (d.budget, d.block, d.declared, d.w) == (16, 8, 17, 17)
    else:
        assert (d.declared, d.w) == (12, 12)


def test_the_diagnosis_is_right_and_fits_the_schema(tree: Any) -> None:
    found = document(tree)
    jsonschema.validate(found, schema())
    assert found["exit"] == 0
    # Elsewhere stock follows the batch, and D = w sizes its buffers. Steps of DDTREE that run ahead
    # at the context limit do not fit into these.
    assert found["uses"] == ("corrected" if tree.deployment.ddtree else "stock")
    assert len(found[found["uses"]]["rules_checked"]) >= 12


@pytest.fixture
def quiet() -> Iterator[None]:
    """SGLang's modules warn when they are first imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_looking_leaves_nothing_patched(quiet: None) -> None:
    module, _, name = CLASS.rpartition(".")
    stock = getattr(importlib.import_module(module), name)
    before, places = dict(vars(stock)), list(patching._PLACES)
    seen = inspection.inspect_hooks()
    assert {s.site for s in seen} >= {"scheduler", "init", "resolve", "build", "replay"}
    assert places == patching._PLACES
    assert dict(vars(stock)) == before


def test_source_and_import_agree_on_every_backend_hook(quiet: None) -> None:
    for hook in sites.hooks_at(None, CLASS):  # type: ignore[arg-type]
        for patch in hook.patches:
            assert inspection._read_source(patch).status == patching.examine(patch).status


SIGNATURE = "def init_forward_metadata(self, forward_batch"
CHANGED = "def init_forward_metadata(self, plan, forward_batch"


def test_a_doctored_copy_is_changed_when_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctored(tmp_path, SIGNATURE, CHANGED)
    (build, *_) = sites.hooks_at(None, CLASS)  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(
        submodule_search_locations=[str(tmp_path / name)]
    ))  # fmt: skip
    found = inspection._read_source(build.patches[0])
    assert found.status == "signature-changed"
    assert "parameters (self, plan, forward_batch)" in found.detail


@pytest.mark.skipif(release() != "0.5.12", reason="one release is enough for the whole process")
def test_a_doctored_copy_is_not_guarded(
    tmp_path: Path, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctored(tmp_path, SIGNATURE, CHANGED)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    d = examine.environment()
    (build,) = [hook for hook in d.survey["hooks"] if hook["site"] == "build"]
    assert (build["status"], build["blocking"]) == ("changed", True)
    assert "plan" in build["detail"]
    assert d.exit_code == 3


def doctored(root: Path, old: str, new: str) -> None:
    """A copy of SGLang made of links, in which one file is another."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    real, copy = Path(next(iter(spec.submodule_search_locations or ()))), root / "sglang"
    parts = CLASS.split(".")[1:-1]
    for part in (*parts[:-1], f"{parts[-1]}.py"):
        copy.mkdir()
        for entry in real.iterdir():
            if entry.name not in (part, "__pycache__"):
                (copy / entry.name).symlink_to(entry)
        real, copy = real / part, copy / part
    text = real.read_text()
    assert old in text
    copy.write_text(text.replace(old, new))


@pytest.mark.parametrize("choice", ["stock", "corrected"])
@pytest.mark.parametrize("budget", [7, 16])
def test_the_prediction_is_what_the_guard_finds_on_the_real_backend(
    budget: int, choice: Any
) -> None:
    from ddtree_guard.guard import Guard
    from ddtree_guard.hooks.configuration import read_configuration
    from ddtree_guard.testing.standins import VerifyCase, build_backend, run_verify, runner_of

    case = VerifyCase(lens=(37, 21), budget=budget, block=8, head_dim=16)
    backend = build_backend(case, choice)
    values = {
        "speculative_algorithm": "DDTREE", "speculative_ddtree_budget": budget,
        "speculative_num_draft_tokens": 8, "speculative_dflash_block_size": 8,
        "attention_backend": "triton", "disable_cuda_graph": True, "context_length": 54,
    }  # fmt: skip
    d, facts = deployment_of(values, release()), generation_of(release())
    predicted = predict(d, facts, corrected=choice == "corrected")
    live = set(Guard().check(read_configuration(runner_of(backend), backend, [])).rules)
    live |= set(Guard().check(run_verify(backend, case).step).rules)
    shared = set(predicted.checked)
    assert set(predicted.rules) & {"CFG1", "CFG5", "W1", "W3", "W8"} == (
        live & shared & {"CFG1", "CFG5", "W1", "W3", "W8"}
    )
    wrong = budget == 16 and choice == "stock" and release() in ("0.5.12", "0.5.16")
    assert predicted.wrong is wrong


def test_the_releases_of_the_matrix_are_told_apart() -> None:
    assert len({generation_of(r.version) for r in MATRIX}) == 4
