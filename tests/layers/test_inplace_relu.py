import torch
from torch.autograd import gradcheck

from uniquery.layers.inplace_relu import inplace_relu


def between_products(relu, x, first, second):
    return second @ relu(first @ x)


def inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 7), (4, 5), (3, 4))
    return [torch.randn(*s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def test_equals_relu_between_matrix_products():
    results = []
    for relu in (torch.relu, inplace_relu):
        tensors = inputs()
        out = between_products(relu, *tensors)
        out.square().sum().backward()
        results.append([out.detach(), *(t.grad for t in tensors)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_gradient():
    assert gradcheck(lambda *tensors: between_products(inplace_relu, *tensors), inputs())


def test_nothing_is_allocated():
    x = torch.randn(6)
    assert inplace_relu(x) is x
    x = torch.randn(6, requires_grad=True)
    gradients = []
    hidden = x * 1
    hidden.register_hook(lambda g: gradients.append(g.data_ptr()))
    out = inplace_relu(hidden)
    gradient = torch.ones(6)
    out.backward(gradient)
    assert gradients == [gradient.data_ptr()]


def test_not_a_number_stays_one():
    assert inplace_relu(torch.tensor([torch.nan, -1.0])).isnan().tolist() == [True, False]
