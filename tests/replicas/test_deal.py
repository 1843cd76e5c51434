"""Blocks of sequences cut the order of all sequences into parts that do not overlap."""

from pyruntime.replicas.deal import Deal, step_of_data


def test_what_did_not_count_is_dealt_again_first():
    deal = Deal()
    assert [deal.take() for _ in range(4)] == [0, 1, 2, 3]
    deal.give_back(3)
    deal.give_back(1)
    assert deal.to_list([0, 2]) == [4, 0, 1, 2, 3]
    assert [deal.take() for _ in range(3)] == [1, 3, 4]


def test_a_deal_goes_on_from_its_list():
    first, *again = [7, 2, 5]
    deal = Deal(first, again)
    assert [deal.take() for _ in range(4)] == [2, 5, 7, 8]


def test_the_steps_of_all_blocks_are_those_of_one_replica_once_each():
    tau = 3
    for of_round in range(4):  # of whatever round a block is taken in
        steps = [
            step_of_data(block, of_round * tau + step, tau)
            for block in range(5)
            for step in range(1, tau + 1)
        ]
        assert steps == list(range(1, 16))
