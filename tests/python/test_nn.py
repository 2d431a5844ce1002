"""thresher.nn: the layer as a model uses it."""

import copy
import io
import pickle

import pytest
import torch

import thresher
from thresher.nn import (
    MsaAttention,
    RMSNorm,
    collect_kl,
    document_positions,
    msa_layers,
    rotary,
    set_mode,
)

from .problem import documents

HIDDEN = 24
MODES = pytest.mark.parametrize("mode", ["warmup", "sparse", "dense"])


def layer(seed=0, **kwargs):
    torch.manual_seed(seed)
    options = dict(top_k_blocks=2, block_size=8, qk_norm=True, mode="sparse")
    return MsaAttention(HIDDEN, 4, 2, 8, 2, 1, **{**options, **kwargs})


def rows(*lead, seed=1, dtype=torch.float32, grad=False):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*lead, HIDDEN, generator=g).to(dtype).requires_grad_(grad)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(layer(seed=i) for i in range(3))

    def forward(self, x, cu_seqlens=None):
        for block in self.layers:
            x = x + block(x, cu_seqlens)
        return x


# --- modes ------------------------------------------------------------------------------------
def test_switch_from_warmup_to_sparse_changes_the_attention_and_nothing_else():
    a, x = layer(mode="warmup"), rows(40)
    before = {n: p.clone() for n, p in a.state_dict().items()}
    dense = a(x)
    assert a.block_indices is None and a.kl_loss > 0
    a.mode = "sparse"
    sparse = a(x)
    assert a.block_indices.shape == (2, 40, 2) and a.kl_loss > 0
    # Two blocks hold all that the first 16 tokens see, but not what later ones do.
    torch.testing.assert_close(dense[:16], sparse[:16], rtol=1e-5, atol=1e-6)
    assert ((dense - sparse)[16:].abs().amax(1) > 1e-3).any()
    assert all(torch.equal(before[n], p) for n, p in a.state_dict().items())


def test_sparse_with_room_for_every_block_equals_warmup():
    a, x = layer(top_k_blocks=5), rows(40)
    sparse, kl = a(x), a.kl_loss
    a.mode = "warmup"
    torch.testing.assert_close(a(x), sparse, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a.kl_loss, kl, rtol=1e-5, atol=1e-6)


def test_dense_mode_has_no_kl_and_the_numbers_of_warmup():
    a, x = layer(mode="warmup"), rows(2, 20)
    warmup = a(x)
    a.mode = "dense"
    assert torch.equal(a(x), warmup)
    assert a.kl_loss is None and a.kl_rows is None and a.block_indices is None


def test_set_mode_reaches_every_layer_and_refuses_unknown_modes():
    model = Model()
    set_mode(model, "warmup")
    assert [m.mode for m in msa_layers(model)] == ["warmup"] * 3
    with pytest.raises(ValueError, match=r"mode.*sparse"):
        set_mode(model, "fast")
    with pytest.raises(ValueError, match="mode"):
        layer(mode="")


@pytest.mark.parametrize(
    "name, value",
    [("num_kv_heads", 3), ("num_proxy_heads", 3), ("num_proxy_kv_heads", 3), ("num_kv_heads", 0)],
)
def test_head_counts_that_do_not_divide_are_refused_by_name(name, value):
    sizes = {"num_heads": 4, "num_kv_heads": 2, "num_proxy_heads": 2, "num_proxy_kv_heads": 1}
    with pytest.raises(ValueError, match=name):
        MsaAttention(HIDDEN, head_dim=8, **{**sizes, name: value})
    with pytest.raises(ValueError, match="kl"):
        layer(kl="sideways")


# --- the value --------------------------------------------------------------------------------
@MODES
def test_layer_is_projection_attention_and_output_projection(mode):
    """And the replayed selection is the layer's own."""
    a, x = layer(mode=mode), rows(2, 20)
    q, k, v, q_proxy, k_proxy = a.project(x)
    assert q.shape == (2, 20, 4, 8) and k.shape == v.shape == (2, 20, 2, 8)
    assert q_proxy.shape == (2, 20, 2, 8) and k_proxy.shape == (2, 20, 1, 8)
    if mode == "sparse":
        r = thresher.msa_attention(q, k, v, q_proxy, k_proxy, block_size=8, top_k_blocks=2)
    else:
        r = thresher.msa_warmup_attention(q, k, v, q_proxy, k_proxy)
    y = a(x)
    assert torch.equal(y, a.o_proj(r.out.flatten(-2)))
    if mode != "dense":
        assert torch.equal(a.kl_loss, r.kl_loss) and torch.equal(a.kl_rows, r.kl)
    if mode == "sparse":
        assert torch.equal(a.block_indices, r.block_indices)
        assert torch.equal(a(x, block_indices=r.block_indices), y)


@MODES
def test_packed_documents_do_not_see_each_other_and_count_positions_from_their_start(mode):
    a, x = layer(mode=mode), rows(41)
    together = a(x, documents(17, 0, 24))
    for part in (slice(0, 17), slice(17, 41)):
        torch.testing.assert_close(together[part], a(x[part]), rtol=1e-5, atol=1e-6)


@MODES
def test_no_token_sees_a_later_one(mode):
    a, x = layer(mode=mode), rows(40)
    other = x.clone()
    other[25:] = rows(15, seed=2)
    assert torch.equal(a(x)[:25], a(other)[:25])


def test_batch_rows_are_independent():
    a, x = layer(), rows(3, 20)
    torch.testing.assert_close(a(x)[1], a(x[1]), rtol=1e-5, atol=1e-6)


def test_document_positions_restart_and_survive_padding():
    assert document_positions(4, None, "cpu").tolist() == [0, 1, 2, 3]
    positions = document_positions(9, documents(3, 0, 2), "cpu")
    assert positions[:5].tolist() == [0, 1, 2, 0, 1]
    assert (positions >= 0).all(), "padding has a position too, whatever it is"


def test_rotary_makes_scores_a_function_of_the_distance():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(8, generator=g), torch.randn(8, generator=g)
    at = torch.arange(50)
    q, k = (rotary(t.expand(50, 1, 8), at, 10_000.0, 0.5)[:, 0] for t in (q, k))
    score = q @ k.T
    torch.testing.assert_close(score[40, 30], score[15, 5], rtol=1e-4, atol=1e-5)
    assert (score[40, 30] - score[40, 20]).abs() > 1e-3
    assert torch.equal(q[:, 4:], q[:1, 4:].expand(50, 4)), "the other half is not turned"


def test_rms_norm_has_mean_square_one_times_its_weight():
    norm, x = RMSNorm(16), rows(5)[:, :16] * 100
    torch.testing.assert_close(norm(x).square().mean(-1), torch.ones(5))
    assert norm(x.bfloat16()).dtype == torch.bfloat16


# --- gradients and KL -------------------------------------------------------------------------
def trained(module):
    return {n for n, p in module.named_parameters() if p.grad is not None and (p.grad != 0).any()}


@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_kl_trains_the_proxy_only_and_the_output_everything_else(mode):
    a, x = layer(mode=mode), rows(40, grad=True)
    a(x)
    a.kl_loss.backward()
    assert trained(a) and all(n.startswith("proxy_") for n in trained(a))
    assert x.grad is None or (x.grad == 0).all(), "the proxy reads its input detached"
    a.zero_grad()
    a(x).square().sum().backward()
    assert trained(a) == {n for n, _ in a.named_parameters() if not n.startswith("proxy_")}
    a.zero_grad()
    (a(x).square().sum() + a.kl_loss).backward()
    assert trained(a) == {n for n, _ in a.named_parameters()}


def test_collect_kl_sums_the_layers_on_the_graph():
    model, x = Model(), rows(40)
    assert collect_kl(model) is None
    model(x)
    total = collect_kl(model)
    assert total.dim() == 0 and total.requires_grad
    torch.testing.assert_close(total, sum(m.kl_loss for m in msa_layers(model)))
    total.backward()
    assert len(trained(model)) == 3 * 4
    set_mode(model, "dense")
    model(x)
    assert collect_kl(model) is None, "nothing is left over from the mode before"


def test_kl_backward_mode_fills_kl_rows_when_the_backward_runs():
    a, b, x = layer(), layer(kl="backward"), rows(2, 20)
    a(x)
    loss = b(x).sum() + b.kl_loss
    assert b.kl_loss == 0 and (b.kl_rows == 0).all()
    loss.backward()
    torch.testing.assert_close(b.kl_rows, a.kl_rows, rtol=1e-4, atol=1e-5)


@MODES
def test_no_grad_gives_the_same_numbers_without_a_graph(mode):
    a, x = layer(mode=mode), rows(40)
    y = a(x)
    with torch.no_grad():
        assert torch.equal(a(x), y)
        assert mode == "dense" or not a.kl_loss.requires_grad
    with torch.inference_mode():
        assert torch.equal(a(x), y)
    a(x).sum().backward()
    assert a.q_proj.weight.grad is not None, "training goes on afterwards"


@MODES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_computes_in_half_precision_and_keeps_fp32_weights(mode, dtype):
    a, x = layer(mode=mode), rows(2, 20, grad=True)
    exact = a(x)
    with torch.autocast("cpu", dtype=dtype):
        y = a(x)
        loss = y.float().square().sum() + (0 if mode == "dense" else a.kl_loss)
    assert y.dtype == dtype
    assert mode == "dense" or a.kl_loss.dtype == torch.float32
    loss.backward()
    for name, p in a.named_parameters():
        assert p.dtype == torch.float32
        if p.grad is not None:
            assert p.grad.dtype == torch.float32 and p.grad.isfinite().all(), name
    # The layer is Lipschitz: rounding of operands moves it by a few eps (a changed choice of a
    # nearly tied block by more, so dense attention is compared).
    if mode != "sparse":
        assert (y.float() - exact).norm() <= 8 * torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_layer_of_another_dtype_computes_in_it(dtype):
    a, x = layer().to(dtype), rows(40, dtype=dtype)
    y = a(x)
    (y.sum() + a.kl_loss.to(dtype)).backward()
    assert y.dtype == dtype and a.q_proj.weight.grad.dtype == dtype
    assert a.kl_loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


# --- copies, pickles, state -------------------------------------------------------------------
KEYS = {f"{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj")}
KEYS |= {"proxy_q_proj.weight", "proxy_k_proj.weight"}
NORM_KEYS = {"q_norm.weight", "k_norm.weight", "proxy_q_norm.weight", "proxy_k_norm.weight"}


def test_state_dict_has_the_documented_keys_and_restores_the_layer():
    assert set(layer(qk_norm=False).state_dict()) == KEYS
    a, b, x = layer(seed=0), layer(seed=5), rows(40)
    assert set(a.state_dict()) == KEYS | NORM_KEYS
    for key in a.state_dict():
        assert key in MsaAttention.__doc__, f"{key} is not documented"
    assert not torch.equal(a(x), b(x))
    b.load_state_dict(a.state_dict())
    assert torch.equal(a(x), b(x))


@pytest.mark.parametrize("when", ["fresh", "after a forward", "after a backward"])
def test_deepcopy_and_pickle_at_any_time_give_independent_layers(when):
    model, x = Model(), rows(40)
    if when != "fresh":
        y = model(x).sum() + collect_kl(model)
        if when == "after a backward":
            y.backward()
    set_mode(model, "warmup")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [
        copy.deepcopy(model),
        copy.copy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ]
    want = model(x)
    for other in copies:
        assert [m.mode for m in msa_layers(other)] == ["warmup"] * 3
        assert torch.equal(other(x), want)
    for other in (copies[0], copies[2], copies[3]):
        assert collect_kl(other) is not None
        with torch.no_grad():
            other.layers[0].q_proj.weight.zero_()
        assert not torch.equal(other(x), want)
    assert torch.equal(model(x), want), "a copy shared the weights"


def test_results_of_a_forward_are_not_copied_along():
    """They belong to a graph: a copy of it is an error of torch, a pickle of it is large."""
    a = layer()
    a(rows(40))
    for other in (copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        assert other.kl_loss is None and other.kl_rows is None and other.block_indices is None
    assert a.kl_loss is not None


def test_moving_and_training_flags_work_like_in_any_module():
    a = layer().eval()
    assert not a.training and a.train().training
    assert "mode=sparse" in repr(a) and "top_k_blocks=2" in repr(a)
    with torch.device("meta"):
        assert layer().q_proj.weight.is_meta


def test_layer_compiles_without_a_graph_break():
    a, x = layer(), rows(40)
    compiled = torch.compile(a, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), a(x))


def test_a_few_steps_lower_the_kl_of_the_proxy():
    """The promise of the warm-up: the proxy learns where the main attention looks."""
    a, x = layer(mode="warmup"), rows(4, 64)
    optimizer = torch.optim.Adam([p for n, p in a.named_parameters() if "proxy" in n], lr=1e-2)
    values = []
    for _ in range(40):
        a(x)
        values.append(float(a.kl_loss.detach()))
        optimizer.zero_grad()
        a.kl_loss.backward()
        optimizer.step()
    assert values[-1] < 0.7 * values[0], values[:: len(values) - 1]
