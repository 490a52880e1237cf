"""Who holds the training state, as workers tell it: no exit code says so."""

from __future__ import annotations

from ftcomm.launch.folder import Event

Who = tuple[int, int]  # a worker: its slot's rank and its incarnation


class Members:
    """Hears the workers' events."""

    def __init__(self) -> None:
        self.admitted: set[Who] = set()  # replacements that came in
        self.refused: set[Who] = set()  # replacements to whom the policy gave no place
        self.start_failed: set[Who] = set()  # who could not start a job, as another one couldn't
        self._misconfigured: set[Who] = set()  # who could not start a job as they were told to
        self._started: set[int] = set()  # ranks of those who could
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
        if event["event"] == "start-failed":
            self.start_failed.add((event["rank"], event["incarnation"]))
        if event["event"] == "misconfigured":
            self._misconfigured.add((event["rank"], event["incarnation"]))
        return True

    @property
    def misconfigured(self) -> set[Who]:
        """Who could start no job: nor can their successors. None of a slot where somebody could: it may have lost something
        since, and be about to get it back; or the script has tried something else, or a second job.
        """
        return {(rank, incarnation) for rank, incarnation in self._misconfigured if rank not in self._started}

    def _hear_of_start(self, event: Event) -> None:
        """Of a job: a new one, together with others, or as one who wants to come in."""
        if event["event"] != "started":
            return
        rank, incarnation = event.get("worker") or (event["rank"], event.get("process"))
        self._started.add(rank)
        self.start_failed.discard((rank, incarnation))  # its script has tried again
        if event.get("joining") is False and event.get("world_size", 1) > 1 and isinstance(incarnation, int):
            self.admitted.add((rank, incarnation))
