"""Which keys of a configuration name code, and who may have it imported."""

from __future__ import annotations

import ast
import copy
import os
import pickle
import typing
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import UsageError
from penstock.tools.train.config.read import load_config, read_config
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.config.source import (
    CODE_KEYS,
    NOT_HERE,
    Distrusted,
    distrust,
    find_source,
    functions_in,
    is_trusted,
    require_trust,
    search_no_working_folder,
)

SOURCE = Path(penstock.__file__).parent
NAME = "subprocess:getoutput"


def text_keys(kind: Any = TrainConfig, path: str = "") -> list[str]:
    """Return every key that takes a text."""
    hints, found = typing.get_type_hints(kind), []
    for field in fields(kind):
        hint = hints[field.name]
        if is_dataclass(hint):
            found += text_keys(hint, f"{path}{field.name}.")
        elif str in (hint, *typing.get_args(hint)):
            found.append(f"{path}{field.name}")
    return found


def planted(key: str) -> dict[str, Any]:
    table, _, name = key.rpartition(".")
    return {table: {name: NAME}} if table else {name: NAME}


@pytest.mark.parametrize("key", text_keys())
def test_what_any_key_names_is_imported_only_where_it_is_marked_and_trusted(key: str) -> None:
    """A key that is new has to be marked before anything imports it, and then it is in every reader's gate."""
    if key not in CODE_KEYS:
        with pytest.raises(ValueError, match="has no code=True in its settings"):
            find_source(key, NAME)
        return
    config = read_config(planted(key), "somebody's file")
    assert functions_in(config) == {key: NAME}
    with pytest.raises(UsageError, match="add --trust"):
        find_source(key, functions_in(config)[key])
    with pytest.raises(UsageError, match=f"planning would import and call {key} = 'subprocess:getoutput'"):
        require_trust(config, "planning")
    own = read_config(planted(key), "my file", trust=True)
    assert find_source(key, functions_in(own)[key]) is __import__("subprocess").getoutput


def test_there_are_the_keys_that_are_known_to_name_code() -> None:
    assert {
        "model.source",
        "data.source",
        "data.validation_source",
        "loss.function",
        "logging.callback",
    } == CODE_KEYS


def test_distrust_survives_what_is_done_with_configurations() -> None:
    config = distrust(replace(TrainConfig(), model=replace(TrainConfig().model, source=NAME)))
    for each in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), replace(config, seed=1)):
        assert not is_trusted(each)
    assert type(asdict(config)["model"]["source"]) is Distrusted


def test_a_document_becomes_a_configuration_in_one_place() -> None:
    """Whoever called `checked(TrainConfig, ...)`, or TrainConfig(**...), would pass the gate by."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            first = getattr(node.args[0], "id", "") if node.args else ""
            if (called, first) == ("checked", "TrainConfig") or (called == "TrainConfig" and node.keywords):
                found.append(str(path.relative_to(SOURCE)))
    assert found == ["tools/train/config/read.py"]


def test_files_are_not_trusted_unless_somebody_says_so(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text(f'[model]\nsource = "{NAME}"\n')
    assert not is_trusted(load_config(path))
    assert is_trusted(load_config(path, trust=True))


def test_processes_search_the_working_folder_only_for_the_users_own_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, mark = NOT_HERE
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "/x", "", "/y"]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    search_no_working_folder()
    assert (os.environ[name], os.environ["PYTHONPATH"]) == (mark, f"/x{os.pathsep}/y")
    find_source("loss.function", "json:dumps")
    assert name not in os.environ
    monkeypatch.setenv(name, "1")  # the user's own wish stays
    find_source("loss.function", "json:dumps")
    assert os.environ[name] == "1"
