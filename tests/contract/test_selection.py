"""Selection: spec.md section 3, alone, judged against float64 with the dtype's rounding bound."""

import pytest
import torch

import reference64

from .cases import HEADS, UNEVEN, make_case
from .checks import assert_selection
from .tolerances import accumulation


def select(api, case, **kwargs):
    x = case.inputs
    options = {k: v for k, v in case.options.items() if k != "softmax_scale"}
    arguments = [case.to_caller(t) for t in (x.q_proxy, x.k_proxy)]
    ids = api.select_blocks(*arguments, **options, **case.geometry(), **kwargs)
    return case.indices_to_packed(ids)


def integers(case, low, high, seed=3):
    """Small integers: every dot product is exact in every dtype, and many are equal."""
    g = torch.Generator().manual_seed(seed)

    def draw(t):
        return torch.randint(low, high + 1, t.shape, generator=g).to(t)

    x = case.inputs
    return case.with_inputs(q_proxy=draw(x.q_proxy), k_proxy=draw(x.k_proxy))


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
def test_selection_is_right_for_every_head_ratio(api, device, dtype, heads):
    case = make_case(device, dtype, heads=heads, lengths=(*UNEVEN, 333), padding=3)
    assert_selection(case, select(api, case))


@pytest.mark.parametrize(
    "block_size, top_k_blocks", [(32, 1), (32, 5), (64, 2), (128, 2), (256, 1)]
)
def test_selection_is_right_for_every_block_size(api, device, main_dtype, block_size, top_k_blocks):
    case = make_case(
        device, main_dtype, lengths=(700, 1, 259), block_size=block_size, top_k_blocks=top_k_blocks
    )
    assert_selection(case, select(api, case))


@pytest.mark.parametrize("block_size, top_k_blocks, proxy_dim", [(1, 4, 3), (7, 3, 20), (48, 2, 1)])
def test_selection_is_right_for_odd_sizes_on_the_cpu(api, block_size, top_k_blocks, proxy_dim):
    case = make_case(
        "cpu",
        torch.float32,
        lengths=(0, 1, 100, 57),
        block_size=block_size,
        top_k_blocks=top_k_blocks,
        proxy_dim=proxy_dim,
    )
    assert_selection(case, select(api, case))


@pytest.mark.parametrize(
    "init_blocks, local_blocks, top_k_blocks",
    [(0, 1, 4), (1, 1, 4), (2, 2, 4), (0, 4, 4), (4, 0, 4), (3, 1, 8), (0, 0, 4), (1, 2, 3)],
)
def test_forced_blocks_are_kept_and_count_towards_k(
    api, device, main_dtype, init_blocks, local_blocks, top_k_blocks
):
    case = make_case(
        device,
        main_dtype,
        lengths=(20, 300, 97),
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        top_k_blocks=top_k_blocks,
    )
    assert_selection(case, select(api, case))


@pytest.mark.parametrize("init_blocks, local_blocks", [(0, 1), (1, 2), (0, 0)])
def test_ties_go_to_the_lower_block_exactly(api, device, dtype, init_blocks, local_blocks):
    case = make_case(
        device,
        dtype,
        lengths=(1, 33, 400, 130),
        top_k_blocks=5,
        heads=HEADS["Hp > Hkv"],
        proxy_scale=0.25,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        padding=2,
    )
    case = integers(case, -1, 1)
    exact = reference64.best_blocks(case.problem, case.inputs.q_proxy, case.inputs.k_proxy)
    assert torch.equal(select(api, case), exact)


def test_exact_order_without_ties(api, device, dtype):
    """Integers with few ties: the margin is zero and the selection must still be the exact one."""
    case = make_case(device, dtype, lengths=(500,), top_k_blocks=6, proxy_scale=1.0)
    case = integers(case, -3, 3)
    exact = reference64.best_blocks(case.problem, case.inputs.q_proxy, case.inputs.k_proxy)
    assert torch.equal(select(api, case), exact)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_equal_scores_keep_the_first_blocks(api, device, dtype, value):
    case = make_case(device, dtype, lengths=(300, 50), top_k_blocks=4)
    x = case.inputs
    case = case.with_inputs(
        q_proxy=torch.full_like(x.q_proxy, value), k_proxy=torch.full_like(x.k_proxy, value)
    )
    ids = select(api, case)
    assert ids[0, 299].tolist() == [0, 1, 2, 9]
    assert ids[0, 95].tolist() == [0, 1, 2, -1]
    assert ids[0, 300 + 49].tolist() == [0, 1, -1, -1]


def test_fewer_blocks_than_k_keeps_all_of_them(api, device, main_dtype):
    case = make_case(device, main_dtype, lengths=(100, 5), top_k_blocks=16)
    ids = select(api, case)
    assert ids[:, 99].tolist() == [[0, 1, 2, 3] + [-1] * 12] * case.heads[2]
    assert ids[:, 104].tolist() == [[0] + [-1] * 15] * case.heads[2]
    assert_selection(case, ids)


def test_margin_of_near_ties_stays_inside_the_rounding_bound(api, device, dtype):
    """Keys that differ in the last bits: whichever block is kept, float64 must allow it."""
    case = make_case(device, dtype, lengths=(600,), top_k_blocks=4, proxy_dim=128)
    k = case.inputs.k_proxy
    g = torch.Generator().manual_seed(5)
    noise = 1 + torch.finfo(dtype).eps * torch.randint(-2, 3, k.shape, generator=g).to(k)
    near = (k[:1].expand_as(k) * noise).contiguous()
    case = case.with_inputs(k_proxy=near)
    assert_selection(case, select(api, case))


@pytest.mark.parametrize("magnitude", [1e-3, 30.0, 170.0])
def test_selection_is_right_for_large_and_small_scores(api, device, dtype, magnitude):
    """170^2 * 64 is about 1.8e6: beyond fp16, so a half-precision score would overflow."""
    case = make_case(device, dtype, lengths=(400,), top_k_blocks=4, proxy_scale=1.0)
    x = case.inputs
    case = case.with_inputs(q_proxy=x.q_proxy * magnitude, k_proxy=x.k_proxy * magnitude)
    assert_selection(case, select(api, case))


def test_nan_scores_rank_below_every_number(api, device, dtype):
    case = make_case(device, dtype, lengths=(320,), top_k_blocks=4, heads=HEADS["MQA"])
    k = case.inputs.k_proxy.clone()
    for block in (1, 3, 4):
        k[32 * block : 32 * (block + 1)] = float("nan")
    ids = select(api, case.with_inputs(k_proxy=k))[0]
    # blocks 0 2 5 6 7 8 are numbers, 9 is local: no NaN block is taken while a number is left
    assert not torch.isin(ids[319], torch.tensor([1, 3, 4], device=ids.device)).any()
    assert ids[191].tolist() == [0, 1, 2, 5]  # 0 and 2, then the lower of the NaN blocks, 5 local


def test_nan_query_keeps_forced_and_lowest_blocks(api, device, dtype):
    case = make_case(device, dtype, lengths=(320,), top_k_blocks=4)
    clean = select(api, case)
    q = case.inputs.q_proxy.clone()
    q[300, 1] = float("nan")
    ids = select(api, case.with_inputs(q_proxy=q))
    assert ids[1, 300].tolist() == [0, 1, 2, 9]
    ids[1, 300] = clean[1, 300]
    assert torch.equal(ids, clean), "NaN of one token changed the selection of another"


def test_one_nan_key_changes_only_its_own_block(api, device, dtype):
    """The block of the NaN key may be kept or not; the order of all other blocks stands."""
    case = make_case(device, dtype, lengths=(320,), top_k_blocks=4, heads=HEADS["MQA"])
    clean = select(api, case)
    k = case.inputs.k_proxy.clone()
    k[70] = float("nan")  # block 2
    ids = select(api, case.with_inputs(k_proxy=k))
    assert torch.equal(ids[:, :70], clean[:, :70])
    for token in range(70, 320):
        before, after = (set(x[0, token].tolist()) - {2, -1} for x in (clean, ids))
        assert before <= after or after <= before, token


def test_selection_does_not_depend_on_the_batch_around_it(api, device, dtype):
    """Across launch shapes: a document alone and among others gives the same bits."""
    case = make_case(device, dtype, lengths=(190, 350, 61), top_k_blocks=3)
    ids = select(api, case)
    x = case.inputs
    alone = make_case(device, dtype, lengths=(350,), top_k_blocks=3).with_inputs(
        q_proxy=x.q_proxy[190:540].clone(), k_proxy=x.k_proxy[190:540].clone()
    )
    assert torch.equal(select(api, alone), ids[:, 190:540])


def test_selection_is_the_same_from_run_to_run(api, device, dtype):
    case = make_case(device, dtype, lengths=(500, 77), top_k_blocks=4)
    first = select(api, case)
    for _ in range(5):
        assert torch.equal(select(api, case), first)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_batched_selection_equals_packed_selection(api, device, main_dtype, layout):
    case = make_case(device, main_dtype, batch=3, lengths=170, layout=layout)
    ids = select(api, case)
    assert_selection(case, ids)
    packed = make_case(device, main_dtype, lengths=(170, 170, 170)).with_inputs(
        **case.inputs._asdict()
    )
    assert torch.equal(select(api, packed), ids)


def test_msa_attention_selects_what_select_blocks_selects(api, device, dtype):
    case = make_case(device, dtype, lengths=(290, 40), init_blocks=1)
    r = api.msa_attention(*case.arguments(), **case.options, **case.geometry())
    assert torch.equal(r.block_indices, select(api, case))


def test_default_scale_is_the_root_of_the_head_dimension(api, device, main_dtype):
    case = make_case(device, main_dtype, lengths=(300,), proxy_dim=128)
    given = select(api, case.with_options(proxy_scale=128**-0.5))
    assert torch.equal(select(api, case), given)
    assert accumulation(main_dtype) == torch.float32
