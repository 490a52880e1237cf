"""Which bytes of a training's state come from whom: a pure function of what is missing and who is there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["CHUNK", "DIRECT", "MOST", "SMALL", "Block", "cut", "deal", "indices", "pick", "sources_for", "spans"]

CHUNK = 4 << 20  # a block has at most this many bytes: what a failure or a wrong checksum costs is a few of them
DIRECT = 1 << 20  # tensors from this size on travel from and to their own memory, smaller ones together
SMALL = 1 << 20  # of a state up to this size a second source would save less time than it takes to ask it
MOST = 8  # sources of one newcomer: more than enough for its link, and the others of a large job are left alone


@dataclass(frozen=True)
class Block:
    """Bytes that travel together.

    Attributes:
        pieces: (tensor, offset, bytes) of each.
        own: of tensors that need not be equal on all ranks: all of them come from one source.
    """

    pieces: tuple[tuple[int, int, int], ...]
    own: bool

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.pieces)


def cut(sizes: Sequence[int], own: Collection[int]) -> list[Block]:
    """The tensors with ``sizes`` bytes as blocks; ``own`` of them are each rank's own. The same wherever the arguments are."""
    blocks: list[Block] = []
    packs: dict[bool, list[tuple[int, int, int]]] = {False: [], True: []}
    room = {False: CHUNK, True: CHUNK}

    def close(mine: bool) -> None:
        if packs[mine]:
            blocks.append(Block(tuple(packs[mine]), mine))
        packs[mine], room[mine] = [], CHUNK

    for index, size in enumerate(sizes):
        mine = index in own
        if size >= DIRECT:
            blocks += [Block(((index, at, min(CHUNK, size - at)),), mine) for at in range(0, size, CHUNK)]
        elif size > 0:
            if size > room[mine]:
                close(mine)
            packs[mine].append((index, 0, size))
            room[mine] -= size
    close(False)
    close(True)
    return blocks


def sources_for(wanting: Mapping[int, Sequence[int]], turned: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Who serves each newcomer in this round; the first of them leads: the header and each rank's own tensors come from it.

    As many newcomers of the same holders are served at once as there are holders. The others wait for the next round, in which
    those who were served serve as well: if the holders die between the two, the state is not lost with them.

    Args:
        wanting: the newcomers, each with those alive who have what it needs.
        turned: how often a newcomer has asked for another leader.
    """
    served: dict[int, tuple[int, ...]] = {}
    before: dict[tuple[int, ...], int] = {}
    for newcomer, having in wanting.items():
        holders = tuple(having)
        number = before.get(holders, 0)
        if number >= len(holders):
            continue
        before[holders] = number + 1
        # Several newcomers have several leaders, and where there are many holders, others altogether.
        first = number * (MOST if len(holders) > MOST else 1) + turned.get(newcomer, 0)
        served[newcomer] = tuple(holders[(first + k) % len(holders)] for k in range(min(MOST, len(holders))))
    return served


def pick(sources: Sequence[int], near: Collection[int], cores: int) -> list[int]:
    """The sources that make a transfer shorter: all of other hosts, and of the newcomer's own what its processors can run.

    Memory moves at the speed of the newcomer's one thread that receives, which one source keeps busy; a second one helps where it
    has a processor to itself, and takes one away where it has not (benchmarks/state_transfer.py).

    Args:
        near: who shares memory with the newcomer.
        cores: processors of its host.
    """
    found: list[int] = []
    for source in sources:
        if source not in near or len([one for one in found if one in near]) < max(1, cores - 1):
            found.append(source)
    return found


def deal(
    blocks: Sequence[Block],
    missing: Iterable[int],
    sources: Sequence[int],
    few: Sequence[int],
    lead: int | None,
    failed: Mapping[int, Sequence[int]],
) -> dict[int, list[int]]:
    """What to ask each source for: shares of about equal size, each of neighbouring blocks.

    Args:
        missing: numbers of blocks.
        sources: who has them.
        few: of the sources, those to ask as long as nothing comes damaged.
        lead: who gives the blocks that are each rank's own; None, or not among the sources: they are not dealt.
        failed: blocks with the sources that have sent them damaged: asked of another one where there is one.
    """
    shares: dict[int, list[int]] = {source: [] for source in sources}
    if not sources:
        return shares
    wanted = sorted(missing)
    total = sum(blocks[index].nbytes for index in wanted)
    if total <= SMALL:
        few = [lead if lead is not None and lead in shares else sources[0]]
    load = dict.fromkeys(few, 0)
    shared = []
    for index in wanted:
        if not blocks[index].own:
            shared.append(index)
        elif lead is not None and lead in shares:
            shares[lead].append(index)
            load[lead] = load.get(lead, 0) + blocks[index].nbytes
    at = 0  # of few, whose share is being filled
    for index in shared:
        nbytes = blocks[index].nbytes
        while at < len(few) - 1 and (load[few[at]] + nbytes / 2) * len(few) > total:
            at += 1
        load[few[at]] += nbytes
        bad = failed.get(index, ())
        others = [few[at], *(source for source in sources if source != few[at])]
        shares[next((source for source in others if source not in bad), few[at])].append(index)
    return {source: sorted(share) for source, share in shares.items()}


def spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers as (first, end) of each run of neighbours."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


def indices(runs: Iterable[tuple[int, int]]) -> list[int]:
    """What :func:`spans` was given."""
    return [number for first, end in runs for number in range(first, end)]
