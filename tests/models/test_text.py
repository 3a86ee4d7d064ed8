import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import vmap

from fedmoe.config import parse_config
from fedmoe.errors import ConfigError
from fedmoe.models.catalog import build_model
from fedmoe.models.network import Network
from fedmoe.models.text import BagOfWords, TextLSTM


def lstm(**changes) -> TextLSTM:
    torch.manual_seed(0)
    return TextLSTM(**{"vocabulary_size": 30, "num_outputs": 3, "embedding": 5, "hidden": 4, **changes})


def rows(texts: list[list[int]], length: int, before: int = 0) -> torch.Tensor:
    return torch.tensor([[0] * before + text + [0] * (length - len(text)) for text in texts])


TEXTS = st.lists(st.lists(st.integers(1, 29), max_size=6), min_size=1, max_size=4)


class TestTextLSTM:
    @settings(max_examples=40)
    @given(texts=TEXTS, extra=st.integers(0, 4), before=st.integers(0, 3), layers=st.integers(1, 2), both=st.booleans())
    def test_padding_and_neighbours_do_not_change_an_answer(self, texts, extra, before, layers, both):
        model = lstm(layers=layers, bidirectional=both)
        together = model(rows(texts, 6 + extra, before))
        for text, scores in zip(texts, together, strict=True):
            assert torch.allclose(model(rows([text], max(1, len(text))))[0], scores, atol=1e-6)

    def test_it_is_the_bidirectional_lstm_of_torch(self):
        model = lstm()
        reference = nn.LSTM(5, 4, batch_first=True, bidirectional=True)
        weights = dict(model.forwards.named_parameters())
        weights |= {f"{name}_reverse": value for name, value in model.backwards.named_parameters()}
        reference.load_state_dict(weights)
        x = rows([[3, 9, 2, 7], [5, 1, 1, 29]], 4)
        _, (last, _) = reference(model.embedding(x))
        assert torch.allclose(model(x), model.head(torch.cat([last[0], last[1]], dim=1)), atol=1e-6)

    def test_the_order_of_words_matters(self):
        assert not torch.allclose(lstm()(rows([[1, 2, 3]], 5)), lstm()(rows([[3, 2, 1]], 5)))

    def test_weights_of_the_news_model(self):
        config = parse_config({"model": {"name": "text_lstm"}}).model
        count = sum(p.numel() for p in build_model(config, (50,), 4, 1000).parameters())
        assert count == 1000 * 100 + 2 * 4 * 64 * (100 + 64 + 2) + 128 * 4 + 4

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
    @pytest.mark.parametrize("both", [True, False])
    def test_every_weight_learns_but_that_of_padding(self, dtype, both):
        model = lstm(bidirectional=both)
        model(rows([list(range(1, 30))], 32).to(dtype)).square().sum().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
        moved = model.embedding.weight.grad.abs().sum(1) > 0
        assert not moved[0] and moved[1:].all()

    def test_a_network_computes_with_the_weights_it_is_given(self):
        network, x = Network(lstm), rows([[1, 2, 3]], 4)
        for seed in (1, 2, 1):
            model = lstm()
            model.load_state_dict(weights := {n: v + 0.1 * seed for n, v in network.init(0).items()})
            assert torch.allclose(network(weights, x), model(x), atol=1e-6)

    def test_recurrent_layers_are_trained_sequentially(self):
        assert not Network(lstm).batching_pays


class TestBagOfWords:
    def test_it_is_linear_in_the_counts(self):
        model = BagOfWords(6, 2, counts="raw")
        dense = torch.zeros(2, 6)
        dense[0, [2, 4]], dense[1, 5] = torch.tensor([3.0, 1.0]), 2.0
        x = torch.tensor([[[2, 4, 0], [3, 1, 0]], [[5, 0, 0], [2, 0, 0]]])
        table = model.weights.weight
        assert torch.allclose(model(x), table[0] + dense @ table, atol=1e-6)

    def test_counts_are_damped_by_default(self):
        model = BagOfWords(6, 2)
        table = model.weights.weight
        once = model(torch.tensor([[[3], [7]]]))
        assert torch.allclose(once, table[0] + torch.log(torch.tensor(8.0)) * table[3], atol=1e-6)

    @settings(max_examples=30)
    @given(text=st.dictionaries(st.integers(1, 29), st.integers(1, 9), max_size=6), extra=st.integers(1, 4))
    def test_padding_does_not_change_an_answer(self, text, extra):
        model = BagOfWords(30, 3)
        short = torch.tensor([[[*text, 0], [*text.values(), 0]]])
        padded = torch.cat([short, torch.stack([torch.zeros(extra), torch.arange(extra)])[None].long()], dim=2)
        assert torch.allclose(model(short), model(padded), atol=1e-6)

    def test_every_weight_learns_and_clients_stack(self):
        network = Network(lambda: BagOfWords(8, 2))
        assert network.batching_pays and network.num_weights == 16
        x = torch.randint(0, 8, (3, 5, 2, 4))
        params = {name: torch.stack([value] * 3) for name, value in network.init(0).items()}
        alone = [network({name: value[0] for name, value in params.items()}, x[client]) for client in range(3)]
        assert torch.allclose(vmap(network)(params, x), torch.stack(alone), atol=1e-6)
        model = BagOfWords(8, 2)
        model(torch.tensor([[[1, 2, 3, 4, 5, 6, 7], [1] * 7]])).sum().backward()
        assert (model.weights.weight.grad.abs() > 0).all()


@pytest.mark.parametrize(
    ("name", "shape", "words", "message"),
    [
        ("text_lstm", (20,), None, r"needs token ids, of shape \(L,\).*no vocabulary\. Use model\.name='mlp'"),
        ("text_lstm", (2, 20), 50, r"these examples have shape \(2, 20\) and 50 words"),
        ("bag_of_words", (20,), 50, r"needs words with counts, of shape \(2, L\)"),
        ("bag_of_words", (2, 20), None, r"no vocabulary"),
    ],
)
def test_a_model_of_texts_needs_texts(name, shape, words, message):
    with pytest.raises(ConfigError, match=message):
        build_model(parse_config({"model": {"name": name}}).model, shape, 2, words)


def test_the_gate_is_the_same_network_with_one_output():
    for name, shape in (("text_lstm", (9,)), ("bag_of_words", (2, 9))):
        config = parse_config({"model": {"name": name}}).model
        assert build_model(config, shape, 1, 20)(torch.ones(3, *shape, dtype=torch.int64)).shape == (3, 1)
