"""Torch's rendezvous, as ftrun runs it."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from ftcomm.launch import meeting


def test_torchs_events_name_the_same_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    def join() -> str:
        return record()

    def record() -> str:
        return str(dynamic_rendezvous.get_method_name())

    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", dynamic_rendezvous.get_method_name)
    assert join() == "join"
    meeting.name_methods_quickly()
    assert dynamic_rendezvous.get_method_name is meeting.method_name
    assert join() == "join"
