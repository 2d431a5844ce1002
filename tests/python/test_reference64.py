"""The judge is judged: tests/reference64 against loops over single numbers and against autograd."""

import math

import pytest
import torch

import reference64
from reference64 import Fragment, Inputs, Problem

FRAGMENTS = (
    Fragment(0, 5, 0, 5),
    Fragment(5, 5, 5, 0),  # an empty document
    Fragment(5, 9, 5, 12),  # the last 4 queries of a document of 12
    Fragment(9, 12, 5, 7),  # an earlier run of the same document
    Fragment(12, 16, 17, 2),  # two queries before the first key
)
HEADS = (6, 3, 2, 1)


def problem(**options):
    defaults = dict(block_size=3, top_k_blocks=2, softmax_scale=0.7, proxy_scale=1.3)
    return Problem(FRAGMENTS, **{**defaults, **options})


def inputs():
    g = torch.Generator().manual_seed(0)
    hq, hkv, hp, hpk = HEADS
    sizes = ((18, hq, 4), (20, hkv, 4), (20, hkv, 4), (18, hp, 5), (20, hpk, 5))
    return Inputs(*(torch.randn(s, generator=g, dtype=torch.float64) for s in sizes))


def dot(a, b):
    return sum(x * y for x, y in zip(a.tolist(), b.tolist()))


def by_loops(p, x, block_indices):
    """out, lse, kl of every token with Python numbers, straight from spec.md sections 2 to 5."""
    hq, hkv, hp, hpk = HEADS
    group = hq // hp
    results = {}
    for f in p.fragments:
        for i in range(f.q_end - f.q_begin):
            t, position = f.q_begin + i, f.k_len - (f.q_end - f.q_begin) + i
            for head in range(hp):
                ids = None if block_indices is None else block_indices[head, t].tolist()
                keys = [
                    f.k_begin + j
                    for j in range(position + 1)
                    if ids is None or j // p.block_size in ids
                ]
                if not keys:
                    continue
                s = [p.proxy_scale * dot(x.q_proxy[t, head], x.k_proxy[j, head // (hp // hpk)])
                     for j in keys]  # fmt: skip
                proxy_lse = math.log(sum(math.exp(a) for a in s))
                teacher = [0.0] * len(keys)
                for h in range(head * group, (head + 1) * group):
                    kv = h // (hq // hkv)
                    S = [p.softmax_scale * dot(x.q[t, h], x.k[j, kv]) for j in keys]
                    total = sum(math.exp(a) for a in S)
                    P = [math.exp(a) / total for a in S]
                    out = [sum(w * x.v[j, kv, d].item() for w, j in zip(P, keys)) for d in range(4)]
                    results[t, h] = (out, math.log(total))
                    teacher = [a + w / group for a, w in zip(teacher, P)]
                kl = sum(w * (math.log(w) - (a - proxy_lse)) for w, a in zip(teacher, s))
                results[t, "kl", head] = kl
    return results


@pytest.mark.parametrize("sparse", [True, False])
def test_rows_equal_loops_over_numbers(sparse):
    p, x = problem(), inputs()
    ids = reference64.best_blocks(p, x.q_proxy, x.k_proxy) if sparse else None
    rows = reference64.forward(p, x, ids)
    results = by_loops(p, x, ids)
    assert results
    for t in range(x.q.shape[0]):
        for h in range(HEADS[0]):
            if (t, h) in results:
                out, lse = results[t, h]
                assert rows.out[t, h].tolist() == pytest.approx(out, rel=1e-12, abs=1e-14)
                assert rows.lse[t, h].item() == pytest.approx(lse, rel=1e-12)
            else:
                assert (rows.out[t, h] == 0).all() and rows.lse[t, h] == -math.inf
        for head in range(HEADS[2]):
            kl = results.get((t, "kl", head), 0.0)
            assert rows.kl[t, head].item() == pytest.approx(kl, rel=1e-11, abs=1e-14)


@pytest.mark.parametrize("sparse", [True, False])
def test_gradients_equal_autograd_of_the_definition(sparse):
    p, x = problem(), inputs()
    ids = reference64.best_blocks(p, x.q_proxy, x.k_proxy) if sparse else None
    g = torch.Generator().manual_seed(1)
    dout = torch.randn(x.q.shape, generator=g, dtype=torch.float64)
    dkl = torch.randn(x.q_proxy.shape[:2], generator=g, dtype=torch.float64)
    leaves = Inputs(*(t.clone().requires_grad_() for t in x))
    hq, hkv, hp, hpk = HEADS
    loss = torch.zeros((), dtype=torch.float64)
    for f, rows in p.chunks(None, x.q.device, hq):
        allowed = reference64.attended_keys(p, f, rows, ids, hp)
        keys = range(f.k_begin, f.k_begin + f.k_len)
        for i, t in enumerate(rows.tolist()):
            for head in range(hp):
                chosen = [j for n, j in enumerate(keys) if allowed[head, i, n]]
                if not chosen:
                    continue
                mains = range(head * hq // hp, (head + 1) * hq // hp)
                teacher = 0
                for h in mains:
                    kv = h // (hq // hkv)
                    S = p.softmax_scale * leaves.k[chosen, kv] @ leaves.q[t, h]
                    P = S.softmax(0)
                    loss = loss + P @ leaves.v[chosen, kv] @ dout[t, h]
                    teacher = teacher + P.detach() / len(mains)
                s = p.proxy_scale * leaves.k_proxy[chosen, head // (hp // hpk)]
                log_student = (s @ leaves.q_proxy[t, head]).log_softmax(0)
                loss = loss + dkl[t, head] * (teacher * (teacher.log() - log_student)).sum()
    loss.backward()
    explicit = reference64.backward(p, x, ids, dout, dkl)
    for name, leaf, gradient in zip(x._fields, leaves, explicit):
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize("init_blocks, local_blocks", [(0, 1), (1, 1), (0, 2), (0, 0)])
def test_best_selection_has_no_fault(init_blocks, local_blocks):
    p = problem(init_blocks=init_blocks, local_blocks=local_blocks)
    x = inputs()
    ids = reference64.best_blocks(p, x.q_proxy, x.k_proxy)
    assert reference64.selection_faults(p, ids, x.q_proxy, x.k_proxy, epsilon=2e-16) == []
    assert (ids[:, 16:] == -1).all()


@pytest.mark.parametrize(
    "change, fault",
    [
        (lambda row: [row[1], row[0]], "ascending"),
        (lambda row: [row[0], row[0]], "ascending"),
        (lambda row: [row[0], -1], "number of blocks"),
        (lambda row: [-1, row[1]], "number of blocks"),
        (lambda row: [row[0], 3], "not visible"),
        (lambda row: [0, 1], "forced"),
        (lambda row: [1 - row[0], row[1]], "beats"),
    ],
)
def test_each_fault_of_a_selection_is_found(change, fault):
    p, x = problem(), inputs()
    ids = reference64.best_blocks(p, x.q_proxy, x.k_proxy)
    token = 11  # position 6 of its document: blocks 0, 1, 2 are visible, 2 is local
    assert ids[0, token, 1] == 2
    ids[0, token] = torch.tensor(change(ids[0, token].tolist()), dtype=torch.int32)
    faults = reference64.selection_faults(p, ids, x.q_proxy, x.k_proxy, epsilon=2e-16)
    assert any(fault in f for f in faults), faults


def test_ties_and_nan_of_the_exact_selection():
    p = reference64.packed([0, 10], block_size=2, top_k_blocks=3)
    q = torch.ones(10, 1, 1)
    k = torch.tensor([5.0, 0, 7, 0, 7, 0, float("nan"), float("nan"), 0, 0]).reshape(10, 1, 1)
    ids = reference64.best_blocks(p, q, k)
    assert ids[0, 9].tolist() == [1, 2, 4]  # two sevens
    k[2:6] = 5.0
    assert reference64.best_blocks(p, q, k)[0, 9].tolist() == [0, 1, 4]  # three fives
    k[0:6] = float("nan")
    k[6:8] = -1.0
    assert reference64.best_blocks(p, q, k)[0, 9].tolist() == [0, 3, 4]  # a number beats NaN


# --- rounding.py --------------------------------------------------------------------------------
NAMES = ("out", "lse", "kl", "q", "k", "v", "q_proxy", "k_proxy")


def results_and_deviations(p, x, dtype):
    """Exact results, those of thresher.reference in `dtype`, and the predicted deviations."""
    import thresher.reference

    cu_seqlens = torch.tensor([0, 70, 150], dtype=torch.int32)
    g = torch.Generator().manual_seed(2)
    dout = torch.randn(x.q.shape, generator=g, dtype=torch.float32)
    dkl = torch.randn(x.q_proxy.shape[:2], generator=g, dtype=torch.float32)
    leaves = [t.to(dtype).requires_grad_() for t in x]
    r = thresher.reference.msa_warmup_attention(*leaves, cu_seqlens=cu_seqlens)
    torch.autograd.backward([r.out, r.kl], [dout.to(dtype), dkl.to(dtype)])
    found = [r.out.detach(), r.lse, r.kl.detach(), *(t.grad for t in leaves)]
    rows = reference64.forward(p, x)
    gradients = reference64.backward(p, x, None, dout, dkl)
    unit = torch.finfo(dtype).eps / 2 / 3**0.5
    deviations = reference64.rounding(
        p, x, None, dout, dkl, rows, gradients, accumulate=unit, store=unit
    )
    exact = {**rows._asdict(), **gradients._asdict()}
    deviations = {**deviations[0]._asdict(), **deviations[1]._asdict()}
    return exact, dict(zip(NAMES, found)), deviations


def random_problem():
    g = torch.Generator().manual_seed(0)
    hq, hkv, hp, hpk = HEADS
    sizes = ((150, hq, 24), (150, hkv, 24), (150, hkv, 24), (150, hp, 16), (150, hpk, 16))
    x = Inputs(*(torch.randn(s, generator=g, dtype=torch.float32) for s in sizes))
    return reference64.packed([0, 70, 150]), x


def test_predicted_rounding_error_is_what_fp32_really_does():
    """Within a factor of 3 in the norm of every tensor, and 10 deviations in every row."""
    exact, found, deviations = results_and_deviations(*random_problem(), torch.float32)
    for name in NAMES:
        error = found[name].double() - exact[name]
        ratio = error.norm() / deviations[name].norm()
        assert 1 / 3 < ratio < 3, f"{name}: {ratio:.2f}"
        if error.dim() == 3:
            error, deviation = error.norm(dim=-1), deviations[name].norm(dim=-1)
            assert (error <= 10 * deviation).all(), name


def test_predicted_rounding_error_covers_sums_that_cancel():
    """All logits equal: dq is exactly 0, and what fp32 leaves of it is the predicted error."""
    p, x = random_problem()
    x = x._replace(q=torch.ones_like(x.q), k=torch.ones_like(x.k))
    exact, found, deviations = results_and_deviations(p, x, torch.float32)
    assert exact["q"].abs().max() < 1e-14
    error = found["q"].norm(dim=-1).double()
    assert error.max() > 0
    assert (error <= 6 * deviations["q"].norm(dim=-1)).all()
