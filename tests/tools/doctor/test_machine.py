"""What is known about a machine before anything has run."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch

from penstock.tools.doctor import machine


def test_a_machine_without_accelerators_is_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    found = machine.describe_machine()
    assert (found["kind"], found["backend"]) == ("cpu", "gloo")
    assert len(found["devices"]) == machine.device_count("cpu") >= 2
    assert json.loads(json.dumps(found)) == found


def test_a_vendors_tool_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    monkeypatch.setattr(machine.subprocess, "run", hang)
    monkeypatch.setattr(machine, "device_type", lambda: "meta")  # any that is no CPU
    monkeypatch.setattr(machine, "device_count", lambda kind: 1)
    assert machine.describe_machine()["topology"] == "nvidia-smi topo -m gave no answer within 20 s"
