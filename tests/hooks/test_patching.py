"""The patcher: what it reports, what it restores, what it refuses."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from ddtree_guard.errors import IncompatibleError
from ddtree_guard.hooks.patching import Original, Patch, apply


class Host:
    """Stands for a class of SGLang."""

    def method(self, x: int, y: int = 1) -> int:
        return x + y

    @staticmethod
    def static(x: int) -> int:
        return x

    @classmethod
    def named(cls, x: int) -> str:
        return f"{cls.__name__}{x}"


class Child(Host):
    """Inherits everything."""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module with fresh copies of the classes, a function and a mapping."""
    module = types.ModuleType("fake_host")
    module.Host = type("Host", (), dict(vars(Host)))  # type: ignore[attr-defined]
    module.Child = type("Child", (module.Host,), {})  # type: ignore[attr-defined]
    module.function = lambda x: x  # type: ignore[attr-defined]
    module.TABLE = {"triton": lambda runner: "stock"}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_host", module)
    return module


def _plus_ten(original: Original) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original.value(*args, **kwargs) + 10

    return wrapper


def _patch(target: str, wrap: Any = _plus_ten, **more: Any) -> Patch:
    return Patch(f"fake_host.{target}", "for the test", wrap, **more)


def test_method_is_wrapped_and_restored_to_the_same_object(host: Any) -> None:
    before = vars(host.Host)["method"]
    report = apply([_patch("Host.method", expects=("self", "x"))])
    assert [o.status for o in report.outcomes] == ["applied"]
    assert host.Host().method(1) == 12
    assert report.restore() == ()
    assert vars(host.Host)["method"] is before


def test_static_and_class_methods_stay_what_they_are(host: Any) -> None:
    before = {name: vars(host.Host)[name] for name in ("static", "named")}
    report = apply([_patch("Host.static"), _patch("Host.named", lambda o: lambda c, x: "n")])
    assert (host.Host().static(1), host.Host.named(1)) == (11, "n")
    report.restore()
    assert all(vars(host.Host)[name] is raw for name, raw in before.items())


def test_inherited_method_is_patched_on_the_child_only(host: Any) -> None:
    report = apply([_patch("Child.method")])
    assert (host.Child().method(1), host.Host().method(1)) == (12, 2)
    report.restore()
    assert "method" not in vars(host.Child)


def test_entry_of_a_mapping(host: Any) -> None:
    before = host.TABLE["triton"]
    report = apply([_patch("TABLE[triton]", lambda o: lambda runner: o.value(runner) + "!")])
    assert host.TABLE["triton"](None) == "stock!"
    report.restore()
    assert host.TABLE["triton"] is before


@pytest.mark.parametrize(
    "target", ["absent.function", "Absent.method", "Host.absent", "TABLE[absent]", "ABSENT[x]"]
)
def test_absent_target_is_reported_and_refused_when_required(host: Any, target: str) -> None:
    report = apply([_patch(target)])
    assert [o.status for o in report.outcomes] == ["absent"]
    with pytest.raises(IncompatibleError, match=r"expected fake_host.* found it absent in SGLang"):
        report.require()


def test_optional_target_may_be_absent(host: Any) -> None:
    report = apply([_patch("Host.absent", required=False)])
    assert report.require() is report


def test_changed_signature_leaves_the_original(host: Any) -> None:
    before = vars(host.Host)["method"]
    report = apply([_patch("Host.method", expects=("self", "batch"))])
    assert report.outcomes[0].status == "signature-changed"
    assert "parameters (self, x, y), expected (self, batch, ...)" in report.outcomes[0].detail
    assert vars(host.Host)["method"] is before


def test_a_value_that_cannot_be_called_is_a_changed_signature(host: Any) -> None:
    host.function = 3
    assert apply([_patch("function", expects=("x",))]).outcomes[0].detail == "it is a int"


def test_second_application_is_already_and_restores_nothing(host: Any) -> None:
    first, second = apply([_patch("function")]), apply([_patch("function")])
    assert [o.status for o in second.outcomes] == ["already"]
    second.restore()
    assert host.function(1) == 11
    first.restore()
    assert host.function(1) == 1


def test_restore_leaves_what_somebody_else_wrapped_and_says_who(host: Any) -> None:
    report = apply([_patch("function")])
    ours = host.function
    host.function = lambda x: ours(x) * 2
    kept = report.restore()
    assert host.function(1) == 22
    assert len(kept) == 1
    assert "fake_host.function stays" in kept[0]
    assert "test_restore_leaves" in kept[0]


def test_a_class_is_never_wrapped_by_a_function(host: Any) -> None:
    before = host.Host
    with pytest.raises(TypeError, match="is a class"):
        apply([_patch("Host")])
    assert host.Host is before


def test_originals_survive_a_rewrite_of_module_globals(host: Any) -> None:
    """What SGLang's HookRegistry does: every module global that is the original is replaced."""
    report = apply([_patch("function")])
    original = next(c.cell_contents for c in host.function.__closure__).value
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()) if hasattr(module, "__dict__") else []:
            if value is original:
                setattr(module, name, None)
    assert host.function(1) == 11
    report.restore()


def test_a_wrapper_over_ours_gets_no_second_layer_of_ours_below_it(host: Any) -> None:
    first = apply([_patch("TABLE[triton]", wrap=lambda original: lambda runner: "ours")])
    ours = host.TABLE["triton"]
    host.TABLE["triton"] = theirs = lambda runner: ours(runner)
    second = apply([_patch("TABLE[triton]")])
    assert [o.status for o in second.outcomes] == ["already"]
    assert "now under" in second.outcomes[0].detail
    assert host.TABLE["triton"] is theirs
    assert len(first.restore()) == 1
    assert first.in_force

    host.TABLE["triton"] = ours  # they leave, and the second try restores
    assert first.restore() == ()
    assert host.TABLE["triton"]("x") == "stock"
    assert not first.in_force


def test_a_patch_that_somebody_took_away_is_applied_again(host: Any) -> None:
    before = host.TABLE["triton"]
    apply([_patch("TABLE[triton]")])
    host.TABLE["triton"] = before
    again = apply([_patch("TABLE[triton]", wrap=lambda original: lambda runner: "ours")])
    assert [o.status for o in again.outcomes] == ["applied"]
    assert host.TABLE["triton"]("x") == "ours"
    again.restore()


def test_a_wrapper_that_passes_everything_on_fits_any_signature(host: Any) -> None:
    host.TABLE["triton"] = lambda *args, **kwargs: "stock"
    report = apply([_patch("TABLE[triton]", expects=("runner",))])
    assert [o.status for o in report.outcomes] == ["applied"]
    report.restore()


def test_a_changed_signature_names_the_function_that_has_it(host: Any) -> None:
    host.TABLE["triton"] = lambda model_runner: "stock"
    detail = apply([_patch("TABLE[triton]", expects=("runner",))]).outcomes[0].detail
    assert "<lambda> has parameters (model_runner), expected (runner, ...)" in detail


def test_a_function_without_a_signature_is_reported_not_raised(host: Any) -> None:
    host.TABLE["triton"] = type  # `type` has no signature to inspect
    report = apply([_patch("TABLE[triton]", expects=("runner",))])
    assert [o.status for o in report.outcomes] == ["signature-changed"]
