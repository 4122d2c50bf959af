"""L_inter against naive loops, in value and gradient."""

import math
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from uniquery.querying.inter_scene import InterSceneLoss, PairLoss
from uniquery.querying.memory import InstancePixels
from uniquery.structures import Queries

KINDS = ["focal", "cross_entropy", "l1", "l2"]


@dataclass(frozen=True)
class Located(Queries):
    locations: Tensor


def pair_loss(kind, x, target, alpha=0.1, gamma=2.5):
    """The textbook form, one number at a time."""
    p = 1 / (1 + math.exp(-x))
    if kind == "l1":
        return abs(p - target)
    if kind == "l2":
        return (p - target) ** 2
    right = p if target else 1 - p
    if kind == "cross_entropy":
        return -math.log(right)
    return -(alpha if target else 1 - alpha) * (1 - right) ** gamma * math.log(right)


def make(q=5, p=23, d=4, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(q, d, generator=g, dtype=dtype, requires_grad=True)
    queries = Queries(embeddings, torch.arange(q) % 2, torch.arange(q))
    stored = InstancePixels(
        torch.randn(p, d, generator=g, dtype=dtype),
        torch.rand(p, 2, generator=g, dtype=dtype) * 100,
        torch.randint(0, 4, (p,), generator=g),
        torch.randint(0, 3, (p,), generator=g),
        torch.rand(p, generator=g) > 0.5,
    )
    return queries, torch.tensor([0, 1, 7, 0, 2])[:q], stored


def naive(kind, logits, image_ids, stored, stuff=None):
    """A loop over every pair; differentiable through the logits by finite differences only."""
    means = []
    for q, row in enumerate(logits):
        losses = []
        for i, x in enumerate(row):
            if stored.image_ids[i] == image_ids[q]:
                continue
            target = stuff is not None and stuff[q] == stored.labels[i] and not stored.is_thing[i]
            losses.append(pair_loss(kind, x.item(), int(target)))
        means.append(sum(losses) / max(len(losses), 1))
    return sum(means) / len(means)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pairs_at_once", [1, 17, 10**6])
@pytest.mark.parametrize("stuff", [None, [0, -1, 2, 1, -1]])
def test_equals_the_loops(kind, pairs_at_once, stuff):
    queries, ids, stored = make()
    labels = None if stuff is None else torch.tensor(stuff)
    closed = InterSceneLoss(PairLoss(name=kind), dot_product_scale=0.5, pairs_at_once=pairs_at_once)
    generic = InterSceneLoss(PairLoss(name=kind), pairs_at_once=pairs_at_once)
    logits = 0.5 * queries.embeddings.detach() @ stored.embeddings.T
    wanted = naive(kind, logits, ids, stored, stuff)
    similarity = lambda q, p: 0.5 * q.embeddings @ p.embeddings.T  # noqa: E731
    values = [closed(queries, ids, stored, None, labels), generic(queries, ids, stored, similarity, labels)]
    gradients = [torch.autograd.grad(v, queries.embeddings)[0] for v in values]
    for value in values:
        assert value.item() == pytest.approx(wanted, rel=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stuff", [None, torch.tensor([0, -1, 2, 1, -1])])
def test_gradcheck(kind, stuff):
    queries, ids, stored = make(p=9)
    for module, similarity in (
        (InterSceneLoss(PairLoss(name=kind), dot_product_scale=1.0, pairs_at_once=10), None),
        (InterSceneLoss(PairLoss(name=kind), pairs_at_once=10), lambda q, p: torch.tanh(q.embeddings @ p.embeddings.T)),
    ):

        def value(embeddings, module=module, similarity=similarity):
            return module(Queries(embeddings, queries.image, queries.target), ids, stored, similarity, stuff)

        assert torch.autograd.gradcheck(value, queries.embeddings)


def test_the_own_image_never_counts():
    queries, _, stored = make()
    ids = torch.full((5,), 3)
    own = stored.image_ids == 3
    loss = InterSceneLoss(dot_product_scale=1.0)
    changed = InstancePixels(
        torch.where(own[:, None], 100.0, stored.embeddings),
        stored.locations,
        stored.image_ids,
        stored.labels,
        stored.is_thing,
    )
    assert own.any()
    assert torch.equal(loss(queries, ids, stored), loss(queries, ids, changed))
    only_own = stored[own]
    value = loss(queries, ids, only_own)
    value.backward()
    assert value.item() == 0
    assert torch.equal(queries.embeddings.grad, torch.zeros_like(queries.embeddings))


def test_nothing_to_compare_is_zero_with_a_graph():
    queries, ids, stored = make()
    loss = InterSceneLoss(dot_product_scale=1.0)
    for q, i, s in ((queries, ids, None), (queries, ids, stored[:0]), (queries[:0], ids[:0], stored)):
        value = loss(q, i, s)
        assert value.item() == 0
        value.backward()
        assert torch.equal(queries.embeddings.grad, torch.zeros_like(queries.embeddings))


def test_extra_fields_of_queries_reach_the_similarity():
    queries, ids, stored = make()
    located = Located(queries.embeddings, queries.image, queries.target, torch.arange(10.0).view(5, 2).double())

    def similarity(q, p):
        return q.embeddings @ p.embeddings.T - torch.cdist(q.locations, p.locations) / 50

    value = InterSceneLoss(pairs_at_once=8)(located, ids, stored, similarity)
    logits = similarity(located, stored).detach()
    assert value.item() == pytest.approx(naive("focal", logits, ids, stored), rel=1e-6)


def test_bfloat16_queries_and_memory():
    queries, ids, stored = make()
    half = Queries(queries.embeddings.detach().bfloat16().requires_grad_(), queries.image, queries.target)
    rows = InstancePixels(
        stored.embeddings.bfloat16(), stored.locations, stored.image_ids, stored.labels, stored.is_thing
    )
    value = InterSceneLoss(dot_product_scale=1.0)(half, ids, rows)
    exact = InterSceneLoss(dot_product_scale=1.0)(queries, ids, stored)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(exact.item(), rel=0.05)
    value.backward()
    assert half.embeddings.grad.dtype == torch.bfloat16


def test_extreme_logits_stay_finite():
    queries, ids, stored = make(dtype=torch.float32)
    for kind in KINDS:
        loud = Queries((queries.embeddings.detach() * 1e4).requires_grad_(), queries.image, queries.target)
        value = InterSceneLoss(PairLoss(name=kind), dot_product_scale=1.0)(loud, ids, stored)
        value.backward()
        assert torch.isfinite(value)
        assert torch.isfinite(loud.embeddings.grad).all()


def test_bad_settings():
    with pytest.raises(ValueError, match="focall"):
        PairLoss(name="focall")
    with pytest.raises(ValueError, match="alpha"):
        PairLoss(alpha=1.5)
    with pytest.raises(ValueError, match="gamma"):
        PairLoss(gamma=-1)


def test_a_similarity_that_would_learn_by_itself():
    queries, ids, stored = make()
    temperature = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def similarity(q, p):
        return temperature * (q.embeddings @ p.embeddings.T)

    with pytest.raises(ValueError, match="the similarity has trainable parameters"):
        InterSceneLoss()(queries, ids, stored, similarity)
    still = Queries(queries.embeddings.detach(), queries.image, queries.target)
    assert InterSceneLoss()(still, ids, stored, similarity) > 0


def test_closed_form_under_autocast():
    queries, ids, stored = make(dtype=torch.float32)
    loss = InterSceneLoss(dot_product_scale=1.0)
    plain = loss(queries, ids, stored)
    with torch.autocast("cpu", torch.bfloat16):
        under = loss(queries, ids, stored)
    under.backward()
    assert torch.equal(plain, under)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_far_out_stay_finite_and_exact_where_it_counts(kind):
    """One query of one channel, so that stored pixels are the logits."""
    embeddings = torch.ones(1, 1, requires_grad=True)
    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    for x in (-300.0, -90.0, -20.0, 0.0, 20.0, 80.0, 300.0):
        stored = InstancePixels(torch.tensor([[x]]), torch.zeros(1, 2), one, zero, one > 0)
        loss = InterSceneLoss(PairLoss(name=kind), dot_product_scale=1.0)
        value = loss(Queries(embeddings, zero, zero), zero, stored)
        (gradient,) = torch.autograd.grad(value, embeddings)
        assert value.isfinite()
        assert gradient.isfinite().all()
        if abs(x) <= 80:
            exact = torch.tensor(x, dtype=torch.float64, requires_grad=True)
            p, cost = exact.sigmoid(), torch.nn.functional.softplus(exact)
            wanted = {"l1": p, "l2": p**2, "cross_entropy": cost, "focal": 0.9 * p**2.5 * cost}[kind]
            slope = torch.autograd.grad(wanted, exact)[0] * x
            assert value.item() == pytest.approx(wanted.item(), rel=1e-5, abs=2e-7)
            assert gradient.item() == pytest.approx(slope.item(), rel=1e-5, abs=2e-6)


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("scale", [0.5, None])
@pytest.mark.parametrize("pairs_at_once", [10, 60, 10**6])  # twelve chunks, two (fewer than threads), one
def test_threads_change_nothing_but_the_order_of_sums(scale, pairs_at_once):
    queries, ids, stored = make()
    module = InterSceneLoss(dot_product_scale=scale, pairs_at_once=pairs_at_once)
    similarity = lambda q, p: 0.5 * q.embeddings @ p.embeddings.T  # noqa: E731
    results = []
    for _ in range(2):
        value = module(queries, ids, stored, similarity)
        results.append((value.detach(), *torch.autograd.grad(value, queries.embeddings)))
        assert torch.get_num_threads() == 3
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    torch.set_num_threads(1)
    value = module(queries, ids, stored, similarity)
    alone = (value.detach(), *torch.autograd.grad(value, queries.embeddings))
    for one, other in zip(results[0], alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


@pytest.mark.usefixtures("three_threads")
def test_an_error_in_a_thread_is_raised_and_the_number_of_threads_restored():
    queries, ids, stored = make()

    def similarity(q, p):
        if len(p) > 1:
            raise RuntimeError("no such pixels")
        return q.embeddings @ p.embeddings.T

    with pytest.raises(RuntimeError, match="no such pixels"):
        InterSceneLoss(pairs_at_once=10)(queries, ids, stored, similarity)
    assert torch.get_num_threads() == 3
    started_later = []
    thread = threading.Thread(target=lambda: started_later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert started_later == [3]
