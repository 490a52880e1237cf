"""Who holds the training state, as workers tell it: no exit code says so."""

from __future__ import annotations

from ftcomm.launch.folder import Event

Who = tuple[int, int]  # a worker: its slot's rank and its incarnation


class Members:
    """Hears the workers' events."""

    def __init__(self) -> None:
        self.admitted: set[Who] = set()  # replacements that came in
        self.refused: set[Who] = set()  # replacements to whom the policy gave no place
        # Who could start no job as they were told to: nor can their successors. Of a slot where nobody has started one yet: later
        # it may have lost something, and be about to get it back.
        self.misconfigured: set[Who] = set()
        self._started: set[int] = set()  # ranks
        self._renumbered: set[str] = set()  # jobs, made by scripts, in which workers have other numbers than here

    def hear(self, event: Event) -> bool:
        """Whether the numbers in it are those of workers, as far as they have told."""
        if "worker" in event:
            self._renumbered.add(event["job"])
        self._hear_of_start(event)
        if event.get("job") in self._renumbered:
            return False
        slot, incarnation = event.get("slot"), event.get("slot_incarnation")
        if event["event"] == "joined" and isinstance(slot, int) and isinstance(incarnation, int):
            self.admitted.add((slot, incarnation))
        if event["event"] == "refused":
            self.refused.add((event["rank"], event["incarnation"]))
        if event["event"] == "misconfigured" and event["rank"] not in self._started:
            self.misconfigured.add((event["rank"], event["incarnation"]))
        return True

    def _hear_of_start(self, event: Event) -> None:
        """Of a new job, together with others."""
        if event["event"] == "started":
            self._started.add(event["rank"])
            self.misconfigured.discard((event["rank"], event["incarnation"]))  # the script has tried something else
        if event["event"] == "started" and event.get("joining") is False and event.get("world_size", 1) > 1:
            rank, incarnation = event.get("worker") or (event["rank"], event.get("process"))
            if isinstance(incarnation, int):
                self.admitted.add((rank, incarnation))
