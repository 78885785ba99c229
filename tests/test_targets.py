"""Dotted names are checked on the login side, without importing what they name."""

import sys

import pytest

from launcher import targets


@pytest.mark.parametrize(
    "target", ["launcher.worker.models.hugging_face", "torch.nn.Linear", "json.JSONDecoder", "os.path.join"]
)
def test_what_exists_is_accepted(target: str) -> None:
    assert targets.check("model._target_", target) == []


def test_what_does_not_exist_is_refused_with_the_nearest() -> None:
    assert targets.check("model._target_", "launcher.worker.models.huging_face") == [
        "model._target_=launcher.worker.models.huging_face: launcher.worker.models has no huging_face; "
        "nearest: hugging_face"
    ]
    assert targets.check("model._target_", "launcher.wrker.models.hugging_face") == [
        "model._target_=launcher.wrker.models.hugging_face: launcher has no wrker; nearest: worker"
    ]
    assert targets.check("loss._target_", "no_such_package.Loss") == [
        "loss._target_=no_such_package.Loss: there is no package no_such_package on this Python's path; "
        "install it or correct the name"
    ]
    assert "dotted name" in targets.check("model._target_", "Linear")[0]
    assert "it is a module" in targets.check("model._target_", "launcher.worker.models")[0]


def test_names_bound_by_any_statement_at_the_top_of_a_module_count(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "shop.py").write_text(
        "import json as j\ntry:\n    from os import path as p\nexcept ImportError:\n    p = None\n"
        "if True:\n    class Inner: ...\nMade = dict(a=1)\nfor Loop in (1,): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("j", "p", "Inner", "Made", "Loop"):
        assert targets.check("k", f"shop.{name}") == []
    assert targets.check("k", "shop.mad") != []
    assert "shop" not in sys.modules
