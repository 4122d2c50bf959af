import pytest
import torch
from torch import nn

from uniquery.layers.attention import MLP, Attention, FeedForward


@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_torchs_with_residual_and_norm(masked):
    torch.manual_seed(0)
    ours, theirs = Attention(8, 2), nn.MultiheadAttention(8, 2, batch_first=True)
    nn.init.normal_(ours.in_bias)
    theirs.in_proj_weight.data.copy_(ours.in_weight)
    theirs.in_proj_bias.data.copy_(ours.in_bias)
    theirs.out_proj.load_state_dict(ours.output.state_dict())
    queries, positions, keys, values = (torch.randn(2, n, 8) for n in (3, 3, 5, 5))
    attend = torch.rand(2, 3, 5) > 0.5
    attend[:, :, 0] = True
    blocked = ~attend.repeat_interleave(2, dim=0) if masked else None
    read, _ = theirs(queries + positions, keys, values, attn_mask=blocked)
    out = ours(queries, positions, keys, values, attend if masked else None)
    torch.testing.assert_close(out, ours.norm(queries + read), rtol=1e-5, atol=1e-5)


def test_feed_forward():
    layer, x = FeedForward(4, 16), torch.randn(2, 3, 4)
    torch.testing.assert_close(layer(x), layer.norm(x + layer.linear2(layer.linear1(x).clamp(min=0))))


def test_perceptron():
    layers, x = MLP(4, 3), torch.randn(2, 4)
    first, second, third = layers
    torch.testing.assert_close(layers(x), third(second(first(x).clamp(min=0)).clamp(min=0)))


def test_perceptron_of_other_widths():
    layers, x = MLP(4, 3, 7, 2), torch.randn(2, 4)
    assert [layer.weight.shape for layer in layers] == [(7, 4), (7, 7), (2, 7)]
    first, second, third = layers
    torch.testing.assert_close(layers(x), third(second(first(x).clamp(min=0)).clamp(min=0)))


@pytest.mark.parametrize("layer", [FeedForward(8, 16, dropout=0.5), Attention(8, 2, dropout=0.5)])
def test_dropout_only_in_training(layer):
    x = torch.randn(2, 3, 8)
    arguments = (x, torch.zeros_like(x), x, x) if isinstance(layer, Attention) else (x,)
    torch.manual_seed(0)
    assert not torch.equal(layer(*arguments), layer(*arguments))
    layer.eval()
    assert torch.equal(layer(*arguments), layer(*arguments))


def test_dropout_keeps_the_mean():
    layer = FeedForward(4, 64, dropout=0.3)
    layer.norm = nn.Identity()
    x = torch.randn(1, 4)
    torch.manual_seed(0)
    mean = layer(x.expand(200_000, 4)).mean(0)
    torch.testing.assert_close(mean, layer.eval()(x)[0], rtol=0.02, atol=0.02)
