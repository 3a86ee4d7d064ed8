"""A personal model behind HTTP: JSON rows in; classes, probabilities, and which expert answered, out.

Whatever a request holds, the answer is JSON: a prediction, or a sentence that says what is wrong with the request.
Needs the extra `serve` (Starlette).
"""

import asyncio
import json
from collections.abc import Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn, TypeVar, get_args

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from fedmoe.data.rows import RowReader
from fedmoe.deployment.predictions import predict
from fedmoe.errors import ConfigError, DataError
from fedmoe.evaluation.personal_model import PersonalModel, Prior

# A web page that makes its own name point to this machine sends that name as Host: it gets no answer.
HOSTS = ["127.0.0.1", "localhost"]


T = TypeVar("T")


class Limits(NamedTuple):
    """Of one request."""

    body_bytes: int = 1 << 20
    rows: int = 1000
    seconds: float = 10.0  # to send it, and again to answer it


def make_app(
    model: PersonalModel, reader: RowReader, about: Mapping[str, Any], limits: Limits | None = None
) -> Starlette:
    """`about` is what GET / tells of the model."""
    service = _Service(model, reader, about, limits or Limits())
    return Starlette(
        routes=[
            Route("/", service.describe),
            Route("/health", service.health),
            Route("/predict", service.predict, methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)],
        exception_handlers={HTTPException: explain},
    )


class _Service:
    def __init__(self, model: PersonalModel, reader: RowReader, about: Mapping[str, Any], limits: Limits) -> None:
        self.model, self.reader, self.about, self.limits = model, reader, about, limits
        self._one_by_one = ThreadPoolExecutor(1)  # a model computes one batch at a time; waiting costs no thread

    async def health(self, _request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def describe(self, _request: Request) -> JSONResponse:
        return JSONResponse({**self.about, "limits": self.limits._asdict()})

    async def predict(self, request: Request) -> JSONResponse:
        rows, prior = question_in(await self._body(request))
        if len(rows) > self.limits.rows:
            refuse(413, f"there are {len(rows)} rows, and at most {self.limits.rows} are answered at once: send fewer.")
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._one_by_one, self._answer, rows, prior)
        late = f"the answer took longer than {self.limits.seconds:g} seconds: send fewer rows, or try again later."
        try:
            return JSONResponse(await within(self.limits.seconds, work, 503, late))
        except (ConfigError, DataError) as error:
            refuse(422, str(error))

    async def _body(self, request: Request) -> bytes:
        most = self.limits.body_bytes
        too_large = f"the request is larger than {most} bytes: send fewer rows at once."
        declared = request.headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared) > most:
            refuse(413, too_large)

        async def read() -> bytes:
            body = bytearray()
            async for part in request.stream():
                body += part
                if len(body) > most:
                    refuse(413, too_large)
            return bytes(body)

        late = f"the request did not arrive within {self.limits.seconds:g} seconds."
        try:
            return await within(self.limits.seconds, read(), 408, late)
        except ClientDisconnect:
            refuse(400, "the request was not sent to its end.")

    def _answer(self, rows: list[Any], prior: Prior | None) -> dict[str, Any]:
        """Estimated label frequencies are those of this request's rows."""
        x = self.reader.values(rows)
        predictions = predict(self.model, x, prior)
        weights = self.model.expert_weights(x)
        experts = None if weights is None else expert_answers(list(weights), torch.stack(list(weights.values()), dim=1))
        if not predictions.class_names:
            return {"values": predictions.answers_NC.tolist(), "experts": experts}
        return {
            "class_names": list(predictions.class_names),
            "classes": predictions.classes,
            "probabilities": predictions.answers_NC.tolist(),
            "experts": experts,
        }


def expert_answers(names: list[str], weights_NK: torch.Tensor) -> dict[str, Any]:
    """Which expert each answer is mostly due to, and how much each had to say."""
    most = [names[best] for best in weights_NK.argmax(1).tolist()]
    return {"names": names, "answered": most, "weights": weights_NK.tolist()}


def question_in(body: bytes) -> tuple[list[Any], Prior | None]:
    """The list under "rows", and under "prior" the label frequencies to answer under, where they are named."""
    wanted = 'Send {"rows": [...]}, one entry per row.'
    try:
        content = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        refuse(400, f"the request is no JSON ({type(error).__name__}: {error}). {wanted}")
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        refuse(400, f"the request has no list under 'rows'. {wanted}")
    prior = content.get("prior")
    if prior is not None and prior not in get_args(Prior):
        refuse(400, f"'prior' is {prior!r}; it is one of {', '.join(get_args(Prior))}, or left away.")
    return content["rows"], prior


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


async def within(seconds: float, work: Awaitable[T], status: int, sentence: str) -> T:
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError:
        refuse(status, sentence)


def refuse(status: int, sentence: str) -> NoReturn:
    raise HTTPException(status, sentence)


async def explain(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)
