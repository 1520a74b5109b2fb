"""Figures of the code to read: for small texts, and once for this tree."""

import json
from pathlib import Path

import pytest

from benchmarks.reading import source
from benchmarks.reading.__main__ import main


def test_module_constants_that_are_numbers(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text("A = 1\nB: float = -2.5 * 3\nC, D = 4, 'text'\nE = True\nF = A + 1\ndef f():\n    G = 7\n")
    assert source.number_constants(file) == ["A", "B", "C"]


def test_docstrings_of_modules_classes_functions_and_attributes(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        '"""One."""\nA = 1\n"""Of two."""\nclass B:\n    """How three."""\n    def f(self):\n        """Four."""\n'
    )
    found = list(source.docstrings(file))
    assert sorted(found) == ["Four.", "How three.", "Of two.", "One."]
    assert sorted(filter(source.is_fragment, found)) == ["How three.", "Of two."]
    assert all(source.is_fragment(f"{word}, six.") for word in ("From", "Behind", "These", "It", "To", "That", "Which"))
    assert not source.is_fragment("Offers nothing.")
    assert not source.is_fragment("Total of seven.")


def test_folders_count_their_own_files_alone(tmp_path: Path) -> None:
    for name in ("a/one.py", "a/two.py", "a/b/three.py", "a/generated/four.py", ".venv/five.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert source.flat_folders(source.python_files(tmp_path), tmp_path) == {"a": 2, "a/b": 1}


def test_this_tree(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--json"])
    figures = json.loads(capsys.readouterr().out)
    steps = {name: set(path["names"]) for name, path in figures["paths"].items()}
    assert {"tandem/worker/loop.py", "decode_worker/half.py", "tandem/engine/model_runner.py"} <= steps["decode step"]
    assert {"tandem/worker/loop.py", "prefill_worker/half.py", "tandem/engine/model_runner.py"} <= steps["prefill step"]
    assert {"prefill_worker/handoff.py", "decode_worker/kv_arrival.py"} <= steps["hand-over"]
    assert all(figures["paths"][name]["lines"] > 100 for name in steps)
    assert any(name.startswith("router/") for name in steps["placement and admission"])
    assert figures["placement_constants"]
    assert 0 <= figures["fragment_share"] < 0.5


def test_a_folder_that_is_no_checkout_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is not a checkout"):
        main(["--tree", str(tmp_path)])
