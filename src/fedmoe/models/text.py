"""Plain networks for texts. Ids are below the size of the vocabulary; 0 is padding, before or after the real tokens.

Shape suffixes: B examples, L tokens, E embedding, H hidden units.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from fedmoe.models.static_shapes import shapes_are_static
from fedmoe.native.recurrent import FINAL_STATES, Recurrence


class TextLSTM(nn.Module):
    """Embedding, LSTM in one or both directions, and a dense layer on the states after each text's last real token.

    Padding, wherever it is, changes nothing: it is moved behind the text, and the second direction starts at the last
    real token. So each direction is an LSTM of its own that reads forwards, the second one over turned-round texts.
    Reads (B, L). Without the second direction it predicts the next character.
    """

    def __init__(
        self,
        vocabulary_size: int,
        num_outputs: int,
        embedding: int = 100,
        hidden: int = 64,
        layers: int = 1,
        bidirectional: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding, padding_idx=0)
        self.forwards = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.backwards = nn.LSTM(embedding, hidden, layers, batch_first=True) if bidirectional else None
        self.head = nn.Linear(hidden * (2 if bidirectional else 1), num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        if not shapes_are_static() and not len(x):
            none: Tensor = self.head(self.head.weight.new_zeros(0, self.head.in_features))
            return none  # an LSTM refuses a batch of none
        lengths_B = (x != 0).sum(1).clamp_min(1)  # an empty text is read as one padding token
        ids_BL = real_first(x.long())
        if not shapes_are_static():  # what is padding for all need not be read
            ids_BL = ids_BL[:, : int(lengths_B.max())]
        states = [self._last_states(self.forwards, ids_BL, lengths_B)]
        if self.backwards is not None:
            states.append(self._last_states(self.backwards, turned_round(ids_BL, lengths_B), lengths_B))
        scores: Tensor = self.head(torch.cat(states, dim=1))
        return scores

    def kernel_recurrence(self) -> Recurrence | None:
        """What `forward` computes, for the native kernels; None for a subclass with another one."""
        if type(self).forward is not TextLSTM.forward:
            return None
        lstms = (self.forwards,) if self.backwards is None else (self.forwards, self.backwards)
        return Recurrence(self.embedding, lstms, FINAL_STATES, ragged=True, head=self.head)

    def _last_states(self, lstm: nn.Module, ids_BL: Tensor, lengths_B: Tensor) -> Tensor:
        states_BLH: Tensor = lstm(self.embedding(ids_BL))[0]
        return states_BLH[torch.arange(ids_BL.shape[0], device=ids_BL.device), lengths_B - 1]


def real_first(ids_BL: Tensor) -> Tensor:
    """Real tokens in their order, then the padding.

    >>> real_first(torch.tensor([[4, 2, 0, 0], [0, 3, 1, 0]]))
    tensor([[4, 2, 0, 0],
            [3, 1, 0, 0]])
    """
    places_L = torch.arange(ids_BL.shape[1], device=ids_BL.device)
    return ids_BL.gather(1, torch.argsort((ids_BL == 0) * ids_BL.shape[1] + places_L, dim=1))  # ONNX has no stable sort


def turned_round(ids_BL: Tensor, lengths_B: Tensor) -> Tensor:
    """Each text from its last real token to its first; padding stays at the end.

    >>> turned_round(torch.tensor([[4, 2, 0], [5, 3, 1]]), torch.tensor([2, 3]))
    tensor([[2, 4, 0],
            [1, 3, 5]])
    """
    places_L = torch.arange(ids_BL.shape[1], device=ids_BL.device)
    return ids_BL.gather(1, (lengths_B[:, None] - 1 - places_L) % ids_BL.shape[1])


class BagOfWords(nn.Module):
    """A linear model of word counts. Reads (B, 2, L): the ids of a text's distinct words, and how often each occurs.

    The weights (vocabulary, outputs) are looked up by id, so that no vector as long as the vocabulary is made.
    Row 0, which no word has, is the bias.
    """

    def __init__(self, vocabulary_size: int, num_outputs: int, counts: Literal["log1p", "raw"] = "log1p") -> None:
        super().__init__()
        self.weights = nn.Embedding(vocabulary_size, num_outputs)
        bound = 1 / math.sqrt(vocabulary_size)  # as nn.Linear starts
        nn.init.uniform_(self.weights.weight, -bound, bound)
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        ids_BL, counts_BL = x[:, 0].long(), x[:, 1] * (x[:, 0] != 0)
        sizes_BL = torch.log1p(counts_BL.float()) if self.counts == "log1p" else counts_BL.float()
        bias = self.weights(torch.zeros_like(ids_BL[:, 0]))
        scores: Tensor = bias + (self.weights(ids_BL) * sizes_BL[..., None]).sum(1)
        return scores
