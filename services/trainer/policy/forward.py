"""Logprobs and entropies of tokens under a causal language model, without whole logits in memory.

Guarantees: logprobs are those of the distribution that the engine samples from. This is
softmax(logits / temperature), over the ids that a token was sampled from where these are known. It is
computed in at least float32.

Logits exist a chunk at a time (`head.py`) where a probe (`find_scaling`) confirms what the model does after
its base: `lm_head`, and perhaps a known scale or cap of the logits. Other models go through their own
forward, with whole logits.

Shape legend: B rows, T columns, N scored tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import structlog
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.common.errors import ConfigError
from tidemill.services.trainer.groups.bins import Layout
from tidemill.services.trainer.groups.columns import SampleColumns
from tidemill.services.trainer.groups.trie import SHORTEST
from tidemill.services.trainer.policy.finite import refuse_broken_numbers
from tidemill.services.trainer.policy.head import PLAIN, Scaling, score_hidden, score_logits
from tidemill.services.trainer.policy.layers import body_of
from tidemill.services.trainer.policy.options import PolicyOption
from tidemill.services.trainer.policy.packing import choose_layout, kinds_of_layers
from tidemill.services.trainer.policy.precision import round_alike
from tidemill.services.trainer.policy.tile import Row, Tile, lay_out
from tidemill.services.trainer.policy.trees import TREE, Tree, no_mask, rows_at

if TYPE_CHECKING:
    from tidemill.services.trainer.algorithm.losses.routing import LayerRouting

log = structlog.get_logger(__name__)

T = TypeVar("T")


def output_head(model: PreTrainedModel) -> nn.Module | None:
    """The module that turns hidden states into logits, where the model has one."""
    head = model.get_output_embeddings()
    return head if isinstance(head, nn.Module) else None


def find_scaling(model: PreTrainedModel) -> Scaling | None:
    """How the model scales `lm_head(body_of(model)(...).last_hidden_state)`; None where that is not known.

    Replaces the head's output by marked values for one pass. What the model gives back is held against what
    its configuration says. Example: the marked values are -60 to 60, the model gives back -120 to 120, and
    its configuration has `logit_scale` 2: the scaling is known.
    """
    head = output_head(model)
    base = body_of(model)
    if head is None or base is model:
        return None
    marked: list[Tensor] = []
    seen: list[Tensor] = []

    def mark(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen.append(inputs[0])
        marked.append(torch.linspace(-60.0, 60.0, output.numel()).view(output.shape).to(output))
        return marked[-1].clone()  # some models scale in place

    # Not token 0: padding often has an embedding of zeros, on which a scale would not show.
    ids_BT = torch.arange(1, 5, device=model.device)[None] % model.config.get_text_config().vocab_size
    hook = head.register_forward_hook(mark)
    try:
        with torch.no_grad():
            logits = model(input_ids=ids_BT, use_cache=False).logits
            hidden = getattr(base(input_ids=ids_BT, use_cache=False), "last_hidden_state", None)
    finally:
        hook.remove()
    if len(seen) != 1 or hidden is None:
        return None
    if hidden.shape != seen[0].shape or logits.shape != marked[0].shape:
        return None
    # A model that scales hidden states hands the head something else than its base returns.
    if not torch.allclose(hidden.to(seen[0].dtype), seen[0], rtol=1e-3, atol=1e-3):
        return None
    if torch.equal(logits.to(marked[0].dtype), marked[0]):
        return PLAIN
    configured = configured_scaling(model.config.get_text_config())
    if configured == PLAIN:
        return None  # however small the difference is: rounding does not explain it
    tolerance = 1e-4 if marked[0].dtype.itemsize > 2 else 2e-2
    expected = configured.of(marked[0].float())
    return configured if torch.allclose(logits.float(), expected, rtol=tolerance, atol=tolerance) else None


def configured_scaling(config: Any) -> Scaling:
    """What a model of this configuration should make of its head's output."""
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= getattr(config, name, None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    return Scaling(float(scale), getattr(config, "final_logit_softcapping", None))


def fill_columns(name: str, values_N: Tensor, tile: Tile, results: Sequence[SampleColumns]) -> None:
    """Put a tile's values at the places of their tokens in their samples."""
    if not tile.rows:
        return
    wide_N = values_N if values_N.dtype == torch.float64 else values_N.float()
    # One copy to the host for all rows: each one waits for the device.
    pieces = wide_N.cpu().split([len(row.places) for row in tile.rows])
    for row, piece in zip(tile.rows, pieces, strict=True):
        results[row.sample][name][row.places] = piece.numpy()


class _Scores(NamedTuple):
    """A tile's scores, named as the fields of `Tile`. A tuple, because FSDP finds the tensors that it hooks
    in tuples, and not in a `Tile`."""

    logprobs_N: Tensor
    entropies_N: Tensor
    log_mass_N: Tensor
    hidden_NH: Tensor | None = None
    routing: "tuple[LayerRouting, ...]" = ()
    changed_N: Tensor | None = None


class TokenScorer:
    """Scores the tokens of tiles with one model, whose weights may change between calls.

    A model that is sharded runs within `root`, the root of its sharding (`fsdp/rank_policy.py`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        compute_dtype: torch.dtype,
        options: Sequence[PolicyOption] = (),
        root: nn.Module | None = None,
    ) -> None:
        """`options` are those of the policy, whose hooks surround its passes; none for a model beside it."""
        self._model = model
        self._options = options
        self._root = root
        self.module = root or model
        self._device = model.device
        self._compute_dtype = compute_dtype
        if self._is_half:
            round_alike(model)
        # Under autocast, because flash attention takes no float32.
        with torch.no_grad(), self._autocast(), ExitStack() as trials:
            for option in options:
                trials.enter_context(option.around_trial())
            self.scaling: Scaling | None = self._find_scaling(model)
            """None where the model needs whole logits."""

    def _find_scaling(self, model: PreTrainedModel) -> Scaling | None:
        """`find_scaling`, which is the model's first pass.

        Raises:
            ConfigError: the model's code mixes dtypes that torch does not mix.
        """
        try:
            return self._run(find_scaling, model)
        except RuntimeError as error:
            is_of_dtypes = any(word in str(error) for word in ("dtype", "scalar type"))
            if not self._is_half or not is_of_dtypes:
                raise
            raise ConfigError(
                f"model.dtype: transformers does not compute a {model.config.model_type} in half precision "
                f"with float32 between its layers ({' '.join(str(error).split())[:200]}); set model.dtype to "
                "float32, or take another model"
            ) from error

    def _run(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args) if self._root is None else self._root(function, *args)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it computes in."""
        return self._compute_dtype

    @property
    def rounding(self) -> float:
        """The relative rounding error of one number in a forward pass."""
        return torch.finfo(self._compute_dtype).eps

    def score(
        self, tile: Tile, temperature: float, *, entropy_gradient: bool = False, keep_hidden: bool = False
    ) -> Tile:
        """The tile with its scores: logprobs and entropies are in float32.

        Logprobs and the mass of the kept ids have gradients; entropies have them if `entropy_gradient`.
        What options have seen in the pass (`pass_scores`) is there if gradients are computed.

        A tile with `columns` gives the scores of all its tokens, with gradients for this rank's. Its
        `hidden_NH` cover this rank's tokens alone.
        """
        scores = self._run(self._score_within, tile, temperature, entropy_gradient, keep_hidden)
        return replace(tile, **scores._asdict())

    def _score_within(self, tile: Tile, *arguments: Any) -> _Scores:
        """The scores of a pass within its options' hooks, of all ranks that share the tile."""
        with ExitStack() as hooks:
            for option in self._options:
                hooks.enter_context(option.around_pass(tile, self._device))
            scores = self._score(tile, *arguments)
            if self._options and torch.is_grad_enabled():
                sources_N = tile.sources_N.to(self._device)
                for option in self._options:
                    scores = scores._replace(**option.pass_scores(sources_N))
            scores = _of_all_ranks(scores, tile)
        if self._root is None:
            return scores
        # The sharding hooks the gradients of tensors in a returned tuple; these must not be views.
        return scores._replace(logprobs_N=scores.logprobs_N.clone(), log_mass_N=scores.log_mass_N.clone())

    def _score(self, tile: Tile, temperature: float, entropy_gradient: bool, keep_hidden: bool) -> _Scores:
        sources_N = tile.sources_N.to(self._device)
        targets_N = tile.targets_N.to(self._device)
        banned_ids = None if tile.banned_ids is None else tile.banned_ids.to(self._device)
        with self._autocast():
            kwargs = self._inputs(tile)
            if self.scaling is None:
                output = self._model(**kwargs, output_hidden_states=keep_hidden)
                hidden_NH: Tensor | None = None
                if keep_hidden:
                    hidden_NH = rows_at(output.hidden_states[-1].flatten(0, 1), sources_N)
                logits_NV = rows_at(output.logits.flatten(0, 1), sources_N)
                scores = score_logits(
                    logits_NV, targets_N, temperature, entropy_gradient, tile.kept, banned_ids
                )
                return _Scores(*scores, hidden_NH)
            hidden_BTH = body_of(self._model)(**kwargs).last_hidden_state
            hidden_NH = rows_at(hidden_BTH.flatten(0, 1), sources_N)
            head = output_head(self._model)
            assert head is not None, "a model whose scaling is known has a head"
            scores = score_hidden(
                hidden_NH,
                head,
                targets_N,
                temperature,
                entropy_gradient=entropy_gradient,
                scaling=self.scaling,
                kept=tile.kept,
                banned_ids=banned_ids,
            )
            return _Scores(*scores, hidden_NH if keep_hidden else None)

    def hidden(self, tile: Tile) -> Tensor:
        """The last hidden states that predict the tile's scored tokens. Shape [N, H]."""
        return self._run(self._hidden, tile)

    def _hidden(self, tile: Tile) -> Tensor:
        with self._autocast():
            kwargs = self._inputs(tile)
            if self.scaling is not None:
                hidden_BTH = body_of(self._model)(**kwargs).last_hidden_state
            else:
                hidden_BTH = self._model(**kwargs, output_hidden_states=True).hidden_states[-1]
        hidden_NH = rows_at(hidden_BTH.flatten(0, 1), tile.sources_N.to(self._device))
        # The sharding hooks the gradient of the returned tensor, which must not be a view.
        return hidden_NH if self._root is None else hidden_NH.clone()

    def _inputs(self, tile: Tile) -> dict[str, Any]:
        kwargs = {
            name: value.to(self._device) if isinstance(value, Tensor) else value
            for name, value in tile.model_kwargs.items()
        }
        if TREE in kwargs:
            kwargs["attention_mask"] = no_mask(self._device)
        if tile.computed is not None:
            kwargs |= tile.computed.of_model(self._model, self._device)
        # A cache would switch off transformers' own detection of packed rows, and nothing reads it.
        return kwargs | {"input_ids": tile.ids_BT.to(self._device), "use_cache": False}

    def _autocast(self) -> AbstractContextManager[Any]:
        """Master weights are float32; matrix products run in the configured dtype."""
        if not self._is_half:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._compute_dtype)

    @property
    def _is_half(self) -> bool:
        return self._compute_dtype not in (torch.float32, torch.float64)


def _of_all_ranks(scores: _Scores, tile: Tile) -> _Scores:
    """Scores of all the tile's tokens, from each rank's; `hidden_NH` stay those of this rank."""
    columns = tile.columns
    if columns is None:
        return scores

    def joined(layer: "LayerRouting") -> "LayerRouting":
        return layer._replace(
            logits_NE=columns.joined(layer.logits_NE), chosen_NK=columns.joined(layer.chosen_NK)
        )

    # Every rank takes part in each of these calls, so their order must be the same on all.
    return _Scores(
        logprobs_N=columns.joined(scores.logprobs_N),
        entropies_N=columns.joined(scores.entropies_N),
        log_mass_N=columns.joined(scores.log_mass_N),
        hidden_NH=scores.hidden_NH,
        routing=tuple(joined(layer) for layer in scores.routing),
        changed_N=None if scores.changed_N is None else columns.joined(scores.changed_N),
    )


MAX_DIFFERENCE = 0.1
"""Limit of the difference of a token's last hidden state, relative to its norm. Rounding in bfloat16 makes
0.01 to 0.03; the first token of a sequence that sees its neighbour differs by about 1."""
SHORT = 7
"""Tokens of the short sequence in these trials."""


def pick_layout(model: PreTrainedModel, scorer: TokenScorer, packing: bool, longest: int) -> Layout:
    """The layout of this model's tiles: that of `choose_layout`, or "padded" where a trial shows that its
    sequences change each other's numbers.

    Raises:
        ConfigError: a token's prediction depends on later tokens. Or it depends on the length of the other
            sequences (up to `longest` tokens), in padded tiles too.
    """
    config = model.config.get_text_config()
    _check_numbers(scorer, config.vocab_size)
    if _looks_ahead(scorer, config.vocab_size):
        raise ConfigError(
            f"model.path: a {model.config.model_type} predicts a token from later ones too, so its logprobs "
            "are not those of text that is generated from left to right; take a causal language model"
        )
    layout = choose_layout(packing, config, bool(getattr(model, "_is_stateful", False)))
    window = config.sliding_window if "sliding_attention" in kinds_of_layers(config) else None
    if layout != "padded" and (problem := _find_leak(scorer, layout, config.vocab_size, longest, window)):
        log.warning(
            "sequences are padded instead of packed, this model does not keep packed ones apart",
            model=str(model.config.model_type),
            reason=problem,
        )
        layout = "padded"
    if layout == "padded" and (problem := _find_leak(scorer, layout, config.vocab_size, longest)):
        raise ConfigError(
            f"model.path: a {model.config.model_type} computes a sequence of {SHORT} tokens otherwise beside "
            f"one of {longest} ({problem}), so that its logprobs are not those of the engine; lower "
            "model.max_model_len, or train another model"
        )
    return layout


@torch.no_grad()
def _check_numbers(scorer: TokenScorer, vocab_size: int) -> None:
    """Raises ConfigError: the model computes numbers that are not finite."""
    tile = lay_out(Tile("padded", [_made_up_row(0, SHORT, vocab_size)]))
    scores = scorer.score(tile, 1.0, keep_hidden=True)
    assert scores.hidden_NH is not None, "they were asked for"
    refuse_broken_numbers(scores.hidden_NH, "hidden states", scorer.dtype)
    refuse_broken_numbers(scores.logprobs_N, "logprobs", scorer.dtype)


@torch.no_grad()
def _find_leak(
    scorer: TokenScorer, layout: Layout, vocab_size: int, longest: int, window: int | None = None
) -> str:
    """What goes wrong with a short sequence beside one of `longest` tokens; empty where its hidden states are
    those that it has alone.

    In trees the short sequence begins with the first half of the long one (at least `SHORTEST` tokens), so
    that the two share these. Example: beside the long one [1 2 3 4 5 6], a short one of [11 12 13] becomes
    [1 2 3 11 12 13].
    """
    long = _made_up_row(0, longest, vocab_size)
    short = _made_up_row(1, SHORT, vocab_size)
    if layout.startswith("tree"):
        ids = np.concatenate([long.ids[: max(SHORTEST, longest // 2)], short.ids])
        places = np.arange(len(ids) - SHORT, len(ids))
        short = Row(1, ids, places, ids[places], places)
    tile = lay_out(Tile(layout, [long, short]))
    try:
        beside = _hidden(scorer, tile)[-SHORT:]
        alone = _hidden(scorer, lay_out(Tile("padded", [short])))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        if layout == "padded":
            raise
        return " ".join(str(error).split())[:200]
    limit = MAX_DIFFERENCE
    tree: Tree | None = tile.model_kwargs.get(TREE)
    if tree is not None:
        limit = min(limit, 3.0 * scorer.rounding**0.5)
        # Asked of the layers: a window that is wider than these sequences changes none of their numbers.
        if window is not None and window not in tree.windows:
            return f"its layers do not say that they attend to {window} tokens"
    differences = (beside - alone).norm(dim=-1) / alone.norm(dim=-1)
    difference = float(differences.max())
    return "" if difference < limit else f"its hidden states differ by {difference:.2%}"


@torch.no_grad()
def _looks_ahead(scorer: TokenScorer, vocab_size: int) -> bool:
    """Whether the first half of a sequence is computed otherwise where the second half has other tokens."""
    some_ids = _made_up_row(0, 2 * SHORT, vocab_size).ids
    other_ids = _made_up_row(1, 2 * SHORT, vocab_size).ids
    first_half = some_ids[:SHORT]
    places = np.arange(SHORT)
    hidden = []
    for second_half in (some_ids[SHORT:], other_ids[SHORT:]):
        ids = np.concatenate([first_half, second_half])
        row = Row(0, ids, places, ids[places], places)
        hidden.append(_hidden(scorer, lay_out(Tile("padded", [row]))))
    gap = (hidden[0] - hidden[1]).norm()
    norm = hidden[0].norm()
    # Not exactly equal: kernels that sort tokens by expert may round otherwise.
    return bool(gap > norm * scorer.rounding**0.5)


def _hidden(scorer: TokenScorer, tile: Tile) -> Tensor:
    hidden_NH = scorer.score(tile, 1.0, keep_hidden=True).hidden_NH
    assert hidden_NH is not None, "they were asked for"
    return hidden_NH.float()


def _made_up_row(sample: int, length: int, vocab_size: int) -> Row:
    """A row of made-up ids, other ones for each `sample`; its last `SHORT` tokens are scored."""
    ids = ((np.arange(1, length + 1) + 10 * sample) % vocab_size).astype(np.int32)
    places = np.arange(max(0, length - SHORT), length)
    return Row(sample, ids, places, ids[places], places)
