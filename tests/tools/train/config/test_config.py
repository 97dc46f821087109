"""A configuration is checked whole: every fault at once, each with the key, the nearest valid one and what would do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.tools.train.config.consistent import check_consistent, stages_of
from penstock.tools.train.config.read import ELSEWHERE, all_keys, checked, load_config, to_document
from penstock.tools.train.config.settings import TrainConfig

ROOT = Path(__file__).resolve().parents[4]


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_a_file_the_defaults_hold_and_go_together() -> None:
    config = load_config(None)
    assert config == TrainConfig()
    check_consistent(config)


def test_the_example_is_valid_and_what_make_train_runs() -> None:
    path = ROOT / "examples/train/gpt.toml"
    config = load_config(path)
    check_consistent(config)
    assert (config.model.source, config.data.source, config.pipeline.ranks) == ("gpt", "stdlib", 4)
    assert re.search(r"^train:.*\n\t.*penstock train examples/train/gpt.toml", (ROOT / "Makefile").read_text(), re.M)


def test_all_examples_are_valid() -> None:
    paths = sorted((ROOT / "examples/train").glob("*.toml"))
    assert len(paths) >= 3
    for path in paths:
        check_consistent(load_config(path))


def test_the_command_line_changes_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "seed = 3\n[training]\nsteps = 5\n")
    changes = [
        "training.steps=7",
        "optimizer.lr=1e-4",
        "pipeline.schedule=zb-v",
        "data.source=2024",  # text, though TOML would read a number
        "pipeline.balance=[1, 2]",
        "model.options.layers=3",
        "optimizer.betas=[0, 0.5]",
    ]
    config = load_config(path, changes)
    assert (config.seed, config.training.steps, config.optimizer.lr) == (3, 7, 1e-4)
    assert (config.pipeline.schedule, config.data.source) == ("zb-v", "2024")
    assert (config.pipeline.balance, config.model.options, config.optimizer.betas) == (
        [1, 2],
        {"layers": 3},
        [0.0, 0.5],
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("trainig.steps=3", r"no key trainig; did you mean training\?"),
        ("training.step=3", r"no key training.step; did you mean training.steps\? training has steps, accumulate"),
        ("pipeline.offload=true", "no key pipeline.offload; offloading is not in Penstock; pipeline.recompute, mesh"),
        ("training.epochs=3", "no key training.epochs; a run is counted in training.steps"),
        ("learning_rate=1e-4", "no key learning_rate; here it is optimizer.lr"),
        ("steps=3", r"no key steps; did you mean training.steps\?"),
        ("training.steps=abc", 'training.steps is "abc"; it takes a whole number, 1 or more'),
        ("training.steps=1.5", "training.steps is 1.5; it takes a whole number"),
        ("training.steps=true", "training.steps is true; it takes a whole number"),
        ("training.steps=0", "training.steps is 0; it takes a whole number, 1 or more"),
        ("optimizer.lr=nan", "optimizer.lr is nan; it takes a finite number above 0"),
        ("optimizer.lr=inf", "optimizer.lr is inf"),
        ("lora.alpha=0", "lora.alpha is 0.0; it takes a finite number above 0"),
        ("optimizer.decay=cosin", 'takes one of "constant", "linear", "cosine", "wsd" \\(nearest: "cosine"\\)'),
        ("checkpoint.async_save=1", "checkpoint.async_save is 1; it takes true or false"),
        ("pipeline=5", "pipeline is a table, not 5; its keys are ranks"),
        (
            "pipeline.balance=[1, x]",
            'pipeline.balance is "\\[1, x\\]"; it takes one of "parameters", "time", "memory" or a ',
        ),
        ("data.validation=2", "data.validation is 2.0; it takes a finite number from 0 to 0.9"),
        ("model.options=3", "model.options is 3; it takes a table"),
        ("seed.x=3", "seed is"),
        ("=3", "is no setting; write key.sub=value"),
        ("training..steps=3", "is no setting"),
    ],
)
def test_a_wrong_setting_is_named_with_what_would_do(tmp_path: Path, change: str, message: str) -> None:
    path = written(tmp_path, "seed = 1\n")
    with pytest.raises(UsageError, match=message):
        load_config(path, [change])


@pytest.mark.parametrize("value", ["2147483648", "1" + "0" * 400])
def test_every_whole_number_has_a_largest(value: str) -> None:
    """A `seed` or `data.window` of 10**30 was a traceback of torch's in whatever command came to it."""
    hints = {name: words for name, words, *_ in all_keys()}
    keys = [name for name, words in hints.items() if words.startswith("a whole number") or "whole numbers" in words]
    assert len(keys) > 20
    for key in keys:
        given = f"[{value}]" if "list of" in hints[key] else value
        if key != "seed" or len(value) > 20:
            with pytest.raises(
                UsageError, match=f"{key} is {value[:40]}.*(a whole number is at most|it takes a whole)"
            ):
                load_config(None, [f"{key}={given}"])
    assert load_config(None, ["seed=9223372036854775807"]).seed == 2**63 - 1


@pytest.mark.timeout(60)
def test_of_a_file_full_of_faults_the_first_are_named(tmp_path: Path) -> None:
    """Each of 600,000 wrong keys was compared with all that there are: hours, for a file of 16 MB."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps({f"key{number}": number for number in range(600_000)}))
    with pytest.raises(UsageError) as caught:
        load_config(path)
    lines = str(caught.value).splitlines()
    assert (len(lines), lines[0]) == (41, f"{path}: 40 or more faults:")


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, "sed = 1\n[training]\nsteps = 'x'\n[optimizer]\nlr = -1\n[nothing]\n")
    with pytest.raises(UsageError) as caught:
        load_config(path)
    text = str(caught.value)
    for part in ("4 faults", "did you mean seed?", "training.steps", "optimizer.lr", "no key nothing"):
        assert part in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", "a = [", "a.toml: "),
        ("a.toml", "seed = 1\nseed = 2\n", "a.toml: "),
        ("a.json", "[1]", "it holds a list, and an object is due"),
        ("a.json", "{", "a.json: "),
        ("a.toml", b"\xff\xfe", "not text in UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=re.escape(message)):
        load_config(path)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no configuration"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="is a folder"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.batch=7"], "7 rows cannot fill 8 microbatches"),
        (["data.batch=1000000000"], "128,000,000,000 tokens .* fills the memory; give 268,435,456 at"),
        (["data.batch=9", "training.accumulate=2"], "cannot divide evenly; 8 or 10 would do"),
        (["mesh.replicas=8"], "= 4 rows cannot fill 8 microbatches.*; 64 rows would"),
        (["mesh.replicas=2", "pipeline.workers=threads"], "mesh.replicas are processes"),
        (["pipeline.ranks=16"], "16 stages cannot be cut from 8 pieces.*layers=14 would do"),
        (["pipeline.ranks=3", "pipeline.stages=4"], "4 stages .* cannot fill 3 ranks .* evenly; 6 stages would"),
        (["pipeline.balance=[1, 2]", "pipeline.stages=4"], "2 counts for 4 stages"),
        (["pipeline.schedule=1f2b"], "pipeline.schedule: "),
        (["pipeline.schedule=forward-only"], "trains nothing"),
        (["pipeline.schedule=none.csv"], "there is no file none.csv"),
        (["optimizer.betas=[0.9]"], "optimizer.betas is"),
        (["optimizer.momentum=0.9"], "optimizer.momentum is for sgd"),
        (["logging.ranks=[4]"], "logging.ranks has 4; the ranks are 0 to 3"),
        (["model.options.width=30", "model.options.heads=4"], "4 heads cannot share evenly"),
        (["model.options.layer=4"], "no key layer; did you mean layers"),
        (["model.options.context=16"], "shorter than data.sequence"),
        (["model.source=llama"], 'huggingface:NAME" such as "huggingface:llama"'),
        (["data.tokens=uint16"], "set model.options.vocabulary"),
        (["data.source=[]"], "data.source is empty"),
        (["data.packing=true", "data.max_tokens=256"], "data.max_tokens is for padded rows"),
        (["data.max_tokens=10"], "10, fewer than the 128 tokens that one row may have"),
        (["data.max_tokens=256"], "needs a model that takes attention_mask"),
        (["data.tokenizer=t", "data.tokens=uint16"], "numbers that need no data.tokenizer"),
        (["loss.options={a=1}"], "loss.options are for loss.function"),
        (["loss.function=mine"], 'loss.function is "mine"; a function is written'),
        (["loss.function=m:f", "loss.router=0.1"], "loss.router is for the built-in loss"),
        (["output="], "output is empty"),
    ],
)
def test_keys_that_do_not_go_together_are_named(changes: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_consistent(load_config(None, changes))


def test_stages_follow_from_what_is_known() -> None:
    assert stages_of(load_config(None, ["pipeline.schedule=zb-v"])) == 8
    assert stages_of(load_config(None, ["pipeline.stages=12"])) == 12
    assert stages_of(load_config(None, ["pipeline.balance=[2, 3, 3]"])) == 3
    assert stages_of(load_config(None, ['pipeline.split_at=["block1"]'])) == 2


def test_a_configuration_survives_its_document(tmp_path: Path) -> None:
    config = load_config(None, ["pipeline.balance=[2, 2, 2, 2]", "optimizer.lr=0.1", "model.options.layers=6"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_document(config)))
    assert load_config(path) == config
    assert checked(TrainConfig, to_document(config), "") == config


def test_checking_a_configuration_needs_no_torch() -> None:
    code = (
        "import sys; from penstock.cli.train import load_items; load_items(['seed=2']); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)


def test_keys_of_other_trainers_are_answered_with_keys_that_exist() -> None:
    own = {name for name, *_ in all_keys()}
    named = {word for words in ELSEWHERE.values() for word in re.findall(r"[a-z]+\.[a-z_]+", words)}
    assert named <= own
    assert not {name.rpartition(".")[2] for name in own} & set(ELSEWHERE)  # a key of ours is not another's
