"""Log-likelihood of continuations given contexts: text to tokens by the harness's convention, and the scoring.

Whitespace at a context's end belongs to the continuation. Context and continuation are encoded together, and of that
the tokens past `len(encode(context))` are the continuation (EleutherAI lm-evaluation-harness 0.4, `TemplateLM`):

    score = sum over t in continuation of log p(token_t | the tokens before it),   in nats

`greedy` says whether every token of the continuation is the likeliest one at its place. What does not fit the
model's positions is cut from the left. log_softmax in float32, sums in float64.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cann_llm_quant.errors import CorpusError, NonFiniteResultError, UsageError
from cann_llm_quant.evaluate.perplexity import row_chunks
from cann_llm_quant.evaluate.token_tree import Batch, TokenTree, common_prefix, grow_tree, plan_batches
from cann_llm_quant.evaluate.tree_attention import TreeAttend, Trunk
from cann_llm_quant.models.decoder import DecoderModel, head
from cann_llm_quant.shown import shown
from cann_llm_quant.tokenizer import adds_bos, encode

BATCH_TOKENS = 512
TRUNK_STEP = 16  # a trunk that is longer by fewer tokens than this is not worth a pass of its own


@dataclass(frozen=True)
class Request:
    """A continuation to be scored behind a context, both in tokens; `place` names it in messages."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    place: str = "request"


@dataclass(frozen=True)
class Score:
    """Nats of a continuation, and whether greedy decoding would write it."""

    logprob: float
    greedy: bool


class Encoder:
    """Pairs of texts to requests, by a tokenizer's own BOS rule."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._bos = adds_bos(tokenizer)
        self._prefix: int | None = tokenizer.bos_token_id
        if self._prefix is None:
            self._prefix = tokenizer.eos_token_id

    def request(self, context: str, continuation: str, place: str = "request") -> Request:
        """The pair in tokens; an empty context is BOS, or EOS where there is no BOS.

        Raises CorpusError when no token is left for the continuation, UsageError for an empty context without either.
        """
        stripped = context.rstrip()
        context, continuation = stripped, context[len(stripped) :] + continuation
        if context:
            whole = encode(self._tokenizer, context + continuation, bos=self._bos)
            before = encode(self._tokenizer, context, bos=self._bos)
        else:
            whole = self._behind_prefix(encode(self._tokenizer, continuation, bos=False))
            before = whole[:1]
        if len(whole) <= len(before):
            raise CorpusError(f"{place}: the continuation {shown(continuation)} adds no token to its context")
        return Request(tuple(before), tuple(whole[len(before) :]), place)

    def _behind_prefix(self, ids: list[int]) -> list[int]:
        if self._prefix is None:
            raise UsageError("an empty context needs a BOS or EOS token to start from; this tokenizer has neither")
        return ids if ids[:1] == [self._prefix] else [self._prefix, *ids]


class Scorer:
    """Scores requests with one model in memory, `batch_tokens` distinct tokens to a pass.

    `max_positions` is the model's limit; the longest sequence is one token longer, whose last is only predicted.
    """

    def __init__(self, model: DecoderModel, max_positions: int, batch_tokens: int = BATCH_TOKENS) -> None:
        if batch_tokens < 1:
            raise UsageError(f"--batch-tokens {batch_tokens} must be at least 1")
        self._model = model
        self._limit = max_positions
        self._batch_tokens = batch_tokens

    def cost(self, requests: Sequence[Request]) -> int:
        """About how many tokens `score` computes: shared beginnings once for all requests in a row."""
        inputs = sorted(self._inputs(request) for request in requests)
        shared = (common_prefix(a, b) for a, b in pairwise(inputs))
        return sum(map(len, inputs)) - sum(shared)

    @torch.inference_mode()
    def score(self, requests: Sequence[Request], progress: Callable[[int], None] = lambda tokens: None) -> list[Score]:
        """Each request's score, in their order; `progress` gets the number of tokens computed since its last call.

        Raises UsageError for a continuation longer than the model's positions, NonFiniteResultError for NaN.
        """
        scores: list[Score | None] = [None] * len(requests)
        for length, members in self._alike(requests):
            trunk = Trunk(self._model.arch.num_layers)
            inputs = [self._inputs(requests[r]) for r in members]
            sharable = [len(ids) - len(requests[r].continuation) for r, ids in zip(members, inputs, strict=True)]
            for batch in plan_batches(inputs, sharable, self._batch_tokens):
                computed = self._extend(trunk, batch, inputs[batch.members[0]], length)
                tree = grow_tree([inputs[s] for s in batch.members], len(trunk.tokens))
                asked = [requests[members[s]] for s in batch.members]
                for s, score in zip(batch.members, self._branches(trunk, tree, asked, length), strict=True):
                    scores[members[s]] = score
                progress(computed + len(tree.ids))
        assert None not in scores
        return [score for score in scores if score is not None]

    def _inputs(self, request: Request) -> tuple[int, ...]:
        """What the model reads: all but the last token, the end of it if it is too long."""
        if len(request.continuation) > self._limit:
            raise UsageError(
                f"{request.place}: a continuation of {len(request.continuation)} tokens exceeds the model's "
                f"{self._limit} positions"
            )
        return (request.context + request.continuation)[-self._limit - 1 : -1]

    def _alike(self, requests: Sequence[Request]) -> Iterator[tuple[int | None, list[int]]]:
        """Requests that may share a pass: all, but only equal lengths where the length decides how RoPE turns."""
        if self._model.arch.rope.kind != "dynamic":
            yield None, list(range(len(requests)))
            return
        groups: dict[int, list[int]] = {}
        for r, request in enumerate(requests):
            groups.setdefault(len(self._inputs(request)), []).append(r)
        yield from sorted(groups.items())

    def _extend(self, trunk: Trunk, batch: Batch, ids: tuple[int, ...], length: int | None) -> int:
        """Make the trunk a beginning of the batch's sequences, the whole common one if that is much longer."""
        trunk.cut(min(common_prefix(trunk.tokens, ids), batch.shared))
        known = len(trunk.tokens)
        new = ids[known : batch.shared]
        if len(new) < TRUNK_STEP:
            return 0
        device = self._model.embedding.device
        positions = torch.arange(known, batch.shared, device=device)[None]
        self._model.hidden(torch.tensor([new], device=device), positions, trunk, length=length)
        trunk.tokens = ids[: batch.shared]
        return len(new)

    def _branches(
        self, trunk: Trunk, tree: TokenTree, requests: Sequence[Request], length: int | None
    ) -> Iterator[Score]:
        """Scores of the sequences of a tree."""
        device = self._model.embedding.device
        attend = TreeAttend(trunk, tree, device)
        hidden = self._model.hidden(tree.ids[None].to(device), tree.depths[None].to(device), attend, length=length)[0]
        nodes = [path[-len(request.continuation) :] for path, request in zip(tree.paths, requests, strict=True)]
        targets = torch.tensor([token for request in requests for token in request.continuation])
        owners = torch.tensor([i for i, request in enumerate(requests) for _ in request.continuation])
        logprob, likeliest = self._predict(hidden, torch.cat(nodes), targets, lambda pair: requests[int(owners[pair])])
        total = torch.zeros(len(requests), dtype=torch.float64).index_add_(0, owners, logprob)
        missed = torch.zeros(len(requests), dtype=torch.int64).index_add_(0, owners, (~likeliest).long())
        return (Score(float(total[i]), not int(missed[i])) for i in range(len(requests)))

    def _predict(
        self,
        hidden: Float[Tensor, "nodes hidden"],
        nodes: Int[Tensor, " pairs"],
        targets: Int[Tensor, " pairs"],
        owner: Callable[[int], Request],
    ) -> tuple[Float[Tensor, " pairs"], Tensor]:
        """Of each pair of a node and a token: log p of the token behind the node (float64), and whether it is first.

        Every node goes through the head once, however many pairs it is in.
        """
        rows, row_of = torch.unique(nodes, return_inverse=True)
        logprob = torch.empty(len(nodes), dtype=torch.float64)
        likeliest = torch.empty(len(nodes), dtype=torch.bool)
        model = self._model
        for chunk in row_chunks(len(rows), model.arch.vocab_size):
            x = hidden[rows[chunk].to(hidden.device)][None]
            logits = head(model.arch, model.norm, model.head_op, x)[0].float()
            pairs = ((row_of >= chunk.start) & (row_of < chunk.stop)).nonzero()[:, 0]
            bad = ~torch.isfinite(logits).all(-1)
            if bool(bad.any()):
                broken = pairs[bad.cpu()[row_of[pairs] - chunk.start]]
                raise NonFiniteResultError(
                    f"{owner(int(broken[0])).place}: the model's logits hold NaN or infinity; "
                    "check the weights with `cann-llm-quant inspect --scan`"
                )
            local, wanted = (row_of[pairs] - chunk.start).to(logits.device), targets[pairs].to(logits.device)
            log_p = logits.log_softmax(-1)
            logprob[pairs] = log_p[local, wanted].double().cpu()
            likeliest[pairs] = (log_p.argmax(-1)[local] == wanted).cpu()
        return logprob, likeliest
