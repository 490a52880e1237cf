"""Which blocks of a state come from whom: every one, once a round, from one who lives and has it."""

from __future__ import annotations

import random

import pytest

from ftcomm.torch.transfer_plan import CHUNK, MOST, SMALL, cut, deal, indices, pick, sources_for, spans

MIB = 1 << 20


def test_all_bytes_are_in_one_block():
    sizes = [3, 0, 9 * MIB + 5, MIB, MIB - 1, *[900_000] * 9, 1]
    own = {0, 4, 7}
    blocks = cut(sizes, own)
    found = [bytearray(size) for size in sizes]
    for block in blocks:
        assert 0 < block.nbytes <= CHUNK
        for index, at, size in block.pieces:
            assert block.own == (index in own)
            found[index][at : at + size] = (
                bytes(1 for _ in range(size)) if not any(found[index][at : at + size]) else b""
            )
    assert [set(taken) for taken in found] == [{1} if size else set() for size in sizes]
    assert blocks == cut(sizes, own)


def test_shares_are_equal():
    """The leader's own blocks count as part of its share."""
    blocks = cut([MIB] * 60 + [5 * MIB] * 4, own={0, 1})
    shares = deal(blocks, range(len(blocks)), [7, 2, 5], [7, 2, 5], 7, {})
    sizes = [sum(blocks[index].nbytes for index in share) for share in shares.values()]
    assert max(sizes) - min(sizes) <= 2 * CHUNK
    assert {index for index, block in enumerate(blocks) if block.own} <= {*shares[7]}
    assert len(spans(shares[2])) == len(spans(shares[5])) == 1


def test_one_source_is_enough_for_little():
    blocks = cut([SMALL // 4] * 4, own={0})
    assert deal(blocks, range(len(blocks)), [3, 4], [3, 4], 4, {}) == {3: [], 4: [*range(len(blocks))]}


def test_what_came_damaged_comes_from_another_one():
    blocks = cut([8 * CHUNK], ())
    before = deal(blocks, range(8), [0, 1, 2], [0], 0, {})
    assert before == {0: [*range(8)], 1: [], 2: []}
    after = deal(blocks, [3, 4], [0, 1, 2], [0], 0, {3: [0], 4: [0, 1]})
    assert after == {0: [], 1: [3], 2: [4]}
    assert deal(blocks, [3], [0], [0], 0, {3: [0]}) == {0: [3]}  # nobody else is left


@pytest.mark.parametrize(("cores", "found"), [(1, [5, 1, 2]), (2, [5, 1, 2]), (3, [5, 1, 6, 2]), (9, [5, 1, 6, 2, 7])])
def test_neighbours_need_a_processor_each(cores, found):
    assert pick([5, 1, 6, 2, 7], {5, 6, 7}, cores) == found


def test_as_many_newcomers_as_holders_at_once():
    assert sources_for({4: [0], 5: [0], 6: [0]}, {}) == {4: (0,)}
    assert sources_for({5: [0, 4], 6: [0, 4]}, {}) == {5: (0, 4), 6: (4, 0)}
    assert sources_for({5: [0, 4]}, {5: 1}) == {5: (4, 0)}
    assert sources_for({0: [2], 1: [3]}, {}) == {0: (2,), 1: (3,)}  # of different shards
    many = sources_for({90: range(40), 91: range(40)}, {})
    assert many == {90: tuple(range(MOST)), 91: tuple(range(MOST, 2 * MOST))}


def test_spans():
    assert spans([1, 2, 3, 7, 9, 10]) == [(1, 4), (7, 8), (9, 11)]
    assert indices(spans([1, 2, 3, 7, 9, 10])) == [1, 2, 3, 7, 9, 10]
    assert spans([]) == []


@pytest.mark.parametrize("first", range(0, 4000, 1000))
def test_whatever_dies_in_whatever_round(first):
    """Some of what was asked for arrives, some of it damaged; sources die. All is there in the end, if one of them lives."""
    for seed in range(first, first + 1000):
        rng = random.Random(seed)
        sizes = [rng.choice([0, 8, 5000, MIB // 3, MIB, 3 * MIB, 11 * MIB]) for _ in range(rng.randrange(30))]
        own = {index for index in range(len(sizes)) if rng.random() < 0.2}
        blocks = cut(sizes, own)
        living = [*range(rng.randrange(1, 12))]
        missing, failed = {*range(len(blocks))}, {}
        for _ in range(100):
            sources = sources_for({99: living}, {})[99]
            assert {*sources} <= {*living}
            assert len({*sources}) == len(sources) == min(MOST, len(living))
            able = [source for source in sources if source == sources[0] or rng.random() < 0.9]
            few = pick(able, {source for source in able if rng.random() < 0.5}, rng.randrange(1, 5))
            assert few
            assert {*few} <= {*able}
            shares = deal(blocks, missing, able, few, sources[0], failed)
            assert {*shares} <= {*living}
            dealt = [number for share in shares.values() for number in share]
            assert sorted(dealt) == sorted(missing), (seed, shares)  # each of them, once
            for source, share in shares.items():
                assert all(source == sources[0] for number in share if blocks[number].own)
                assert not any(
                    source in failed.get(n, ()) and {*able} - {*failed[n]} for n in share if not blocks[n].own
                )
                dies = len(living) > 1 and rng.random() < 0.3
                if dies:
                    living.remove(source)
                for number in share[: rng.randrange(len(share) + 1)] if dies else share:
                    if rng.random() < 0.05:
                        failed.setdefault(number, []).append(source)
                    else:
                        missing.discard(number)
            if not missing:
                break
        assert not missing, seed
