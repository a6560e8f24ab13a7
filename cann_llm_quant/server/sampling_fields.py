"""The fields that every request for text shares, with the engine's meaning and bounds.

Types are checked here, strictly (a text is no number), ranges by `GenerationSettings`, so that there is one place for
each. null stands for the default everywhere, as OpenAI's clients send it. A field that is not known is refused: a
request whose `tools` were ignored would be answered wrongly.
"""

import secrets
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from cann_llm_quant.runner.settings import GenerationSettings

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024


def whole_characters(text: str) -> str:
    """The text; ValueError where JSON's escapes made halves of characters, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"half of a surrogate pair at character {error.start}") from error
    return text


Text = Annotated[str, AfterValidator(whole_characters)]
Stop = Annotated[Text, Field(max_length=MAX_STOP_CHARACTERS)]
TokenKey = Annotated[int, Field(strict=False)]  # JSON's keys are texts


class SamplingFields(BaseModel):
    """Fields named as in `GenerationSettings`; None leaves its default."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[TokenKey, float] | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_ids: list[int] | None = None
    include_stop: bool | None = None
    ignore_eos: bool | None = None

    def settings(self, **others: Any) -> GenerationSettings:
        """The engine's settings, `others` among them; a seed by chance where the request has none.

        Raises RequestError for a value out of range.
        """
        given = {name: getattr(self, name) for name in SamplingFields.model_fields}
        given["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        given |= {name: tuple(given[name]) for name in ("stop", "stop_ids") if given[name] is not None}
        given["seed"] = secrets.randbits(63) if self.seed is None else self.seed
        wanted = {name: value for name, value in (given | others).items() if value is not None}
        return GenerationSettings(**wanted)
