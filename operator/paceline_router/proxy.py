"""The streaming path: one ASGI call per model request, from the client's bytes to the engine's and back.

Order: authenticate, read the body, find the model, pick an endpoint, send, stream, enter the end in the ledger. No
framework sits between the client's socket and the engine's. Runs on one event loop; no state is shared across threads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Callable

import aiohttp

from paceline_api.runtimes import facts_of
from paceline_api.slo import End
from paceline_router import headers as header_rules
from paceline_router.asgi import Answer, ClientGone, Receive, Scope, Send, wait_disconnect
from paceline_router.auth import Authenticator, Credentials, salt_of
from paceline_router.body import Question, read_body, read_question, with_usage
from paceline_router.errors import ApiError, ModelNotFound, NoCapacity, Unauthorized, UpstreamFailed, error_object
from paceline_router.inflight import InFlight
from paceline_router.ledger import Entry, Ledger
from paceline_router.load import ReportedLoad
from paceline_router.policy import choose
from paceline_router.records import Endpoint, EndpointId, TenantRecord
from paceline_router.retry import CoolDown, RetryBudget
from paceline_router.settings import ATTEMPTS_MAX, MODELS_NAMED_MAX, WHOLE_ANSWER_BYTES_MAX, Limits
from paceline_router.snapshot import Model, Snapshot
from paceline_router.sse import WholeLines, error_event, usage_tokens, without_usage_event
from paceline_router.token_file import TokenFile
from paceline_router.upstream import AttemptFailed, Upstreams, attempt, read_whole

log = logging.getLogger(__name__)

PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})
JSON_HEADER = (b"content-type", b"application/json")
CODE_CLIENT_GONE = 499
_TURNS_MAX = 4096
_CLIENT_FAULTS = range(400, 500)


class Proxy:
    """See the module docstring. `snapshot` gives the current view, `salt_secret` what keys the tenants' salts."""

    def __init__(
        self,
        *,
        snapshot: Callable[[], Snapshot],
        upstreams: Upstreams,
        authenticator: Authenticator,
        ledger: Ledger,
        limits: Limits,
        token: TokenFile | None,
        salt_secret: Callable[[], bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.in_flight = InFlight()
        self.reported = ReportedLoad()
        self._snapshot = snapshot
        self._upstreams = upstreams
        self._authenticator = authenticator
        self._ledger = ledger
        self._limits = limits
        self._token = token
        self._salt_secret = salt_secret
        self._clock = clock
        self._budget = RetryBudget()
        self._cool_down = CoolDown()
        self._turns: dict[str, int] = {}
        self._open = 0

    @property
    def open_requests(self) -> int:
        """Requests accepted and not yet ended."""
        return self._open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = header_rules.decoded(scope["headers"])
        entry = Entry(self._clock(), header_rules.request_id(headers, uuid.uuid4().hex))
        answer = Answer(send, self._limits.write_timeout_s)
        end, code = End.FAILED, 500
        self._open += 1
        try:
            end, code = await self._serve(scope, headers, receive, answer, entry)
        except ClientGone:
            end, code = End.CANCELLED, CODE_CLIENT_GONE
        except ApiError as error:
            end, code = await self._refuse(error, answer, entry)
        except asyncio.CancelledError:
            code = CODE_CLIENT_GONE
            raise
        except Exception:
            log.exception("Request %s failed inside the router", entry.request_id)
            end, code = await self._refuse(ApiError("the router failed; try again"), answer, entry)
        finally:
            self._open -= 1
            self._ledger.close(entry, end, code, self._clock())

    async def _serve(
        self, scope: Scope, headers: dict[str, str], receive: Receive, answer: Answer, entry: Entry
    ) -> tuple[End, int]:
        snapshot = self._snapshot()
        tenant = entry.tenant = self.authenticate(snapshot, headers, scope)
        if self._open > self._limits.max_requests:
            raise NoCapacity(f"this router has {self._limits.max_requests} requests open; try again shortly")
        body = await read_body(
            receive,
            content_length=headers.get("content-length"),
            max_bytes=snapshot.router.max_body_bytes,
            timeout_s=self._limits.body_timeout_s,
        )
        question = read_question(body)
        entry.service = find_model(snapshot, tenant, question.model).service
        sent = header_rules.for_any_engine(headers, request_id=entry.request_id)
        private = header_rules.Private(
            tenant.name,
            salt_of(self._salt_secret(), tenant.name),
            None if self._token is None else self._token.current(),
        )
        if question.needs_usage:
            body = with_usage(body)
        relay = asyncio.create_task(self._relay(scope["path"], question, sent, private, body, answer, entry))
        gone = asyncio.create_task(wait_disconnect(receive))
        try:
            await asyncio.wait((relay, gone), return_when=asyncio.FIRST_COMPLETED)
            if not relay.done():
                raise ClientGone
            return relay.result()
        finally:
            relay.cancel()
            gone.cancel()
            await asyncio.gather(relay, gone, return_exceptions=True)

    def authenticate(self, snapshot: Snapshot, headers: dict[str, str], scope: Scope) -> TenantRecord:
        """The tenant of a request, or Unauthorized, counted."""
        peer = scope.get("client")
        try:
            return self._authenticator.tenant_of(
                Credentials.of(headers, peer[0] if peer else None),
                keys=snapshot.keys,
                tenants=snapshot.tenants,
                anonymous_tenant=snapshot.router.anonymous_tenant,
            )
        except Unauthorized as error:
            self._ledger.refused(error.reason)
            raise

    async def _relay(
        self,
        path: str,
        question: Question,
        headers: dict[str, str],
        private: header_rules.Private,
        body: bytes,
        answer: Answer,
        entry: Entry,
    ) -> tuple[End, int]:
        """Try endpoints until one answers, at most ATTEMPTS_MAX and within the budget; then pass its answer on."""
        self._budget.earn()
        entry.streamed = question.stream
        tried: set[EndpointId] = set()
        delivered = False
        while True:
            endpoint = self._pick(question.model, tried)
            sent = headers | private.for_runtime(facts_of(endpoint.runtime))
            try:
                with self.in_flight.track(endpoint.id):
                    async with attempt(self._upstreams, endpoint, path, sent, body) as response:
                        return await self._pass_on(response, answer, entry, question)
            except AttemptFailed as failure:
                self._ledger.upstream_error(question.model, failure.reason)
                self._cool_down.add(endpoint.id, self._clock())
                tried.add(endpoint.id)
                # A request that was delivered is repeated once: it may be what felled the engine.
                again = failure.retryable and not (failure.delivered and delivered) and len(tried) < ATTEMPTS_MAX
                delivered = delivered or failure.delivered
                if not (again and self._has_other(question.model, tried) and self._budget.spend()):
                    raise self._given_up(failure, question.model) from None

    def _pick(self, model_name: str, tried: set[EndpointId]) -> Endpoint:
        """The endpoint by the service's policy, among those that serve now; rested ones before such as just failed."""
        model = self._snapshot().models.get(model_name)
        serving = [] if model is None else [endpoint for endpoint in model.serving if endpoint.id not in tried]
        if model is None or not serving:
            raise NoCapacity(f"no engine of {model_name} is ready; try again shortly")
        now = self._clock()
        rested = [endpoint for endpoint in serving if not self._cool_down.active(endpoint.id, now)]
        candidates = rested or serving
        if len(self._turns) > _TURNS_MAX:
            self._turns.clear()
        turn = self._turns.get(model_name, 0)
        self._turns[model_name] = turn + 1
        counts = [self.in_flight.at(one.id) + self.reported.others(one.id, now) for one in candidates]
        return candidates[choose(model.service.policy, counts, turn)]

    def _has_other(self, model_name: str, tried: set[EndpointId]) -> bool:
        model = self._snapshot().models.get(model_name)
        return model is not None and any(endpoint.id not in tried for endpoint in model.serving)

    @staticmethod
    def _given_up(failure: AttemptFailed, model_name: str) -> ApiError:
        if failure.busy:
            return NoCapacity(f"the engines of {model_name} take no requests now; try again shortly")
        return UpstreamFailed(f"the engine of {model_name} did not answer ({failure.reason}); try again")

    async def _pass_on(
        self, response: aiohttp.ClientResponse, answer: Answer, entry: Entry, question: Question
    ) -> tuple[End, int]:
        if response.status in (401, 403):
            log.error("The engine of %s refused the internal token (HTTP %d)", question.model, response.status)
            raise UpstreamFailed(f"the engine of {question.model} refused this router; tell the platform team")
        headers = header_rules.for_client(response.raw_headers, request_id=entry.request_id)
        if response.content_type == "text/event-stream":
            return await self._pass_stream(response, headers, answer, entry, question)
        body = await read_whole(response, WHOLE_ANSWER_BYTES_MAX)
        await answer.whole(response.status, headers, body)
        entry.streamed = False
        entry.meter.usage_tokens = _usage_of(body, response.headers.get("content-encoding"))
        return _end_of(response.status), response.status

    async def _pass_stream(
        self,
        response: aiohttp.ClientResponse,
        headers: list[tuple[bytes, bytes]],
        answer: Answer,
        entry: Entry,
        question: Question,
    ) -> tuple[End, int]:
        """Pass events on as they come. The client gets each before it is looked at here."""
        meter = entry.meter
        lines = WholeLines()
        await answer.start(response.status, headers)

        async def pass_lines(whole: bytes) -> None:
            shown = without_usage_event(whole) if question.needs_usage else whole
            if shown:
                await answer.part(shown)
            meter.feed(whole, self._clock())

        broken = False
        try:
            async for part in response.content.iter_any():
                if whole := lines.push(part):
                    await pass_lines(whole)
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            broken = True
        if not broken and (rest := lines.flush()):
            await pass_lines(rest)
        await self._end_stream(answer, entry, question.model, broken=broken)
        complete = meter.done and not meter.failed and not broken
        return (End.FINISHED if complete else End.FAILED), response.status

    async def _end_stream(self, answer: Answer, entry: Entry, model_name: str, *, broken: bool) -> None:
        """Close the stream; one that is incomplete ends with an error event and is counted once."""
        if entry.meter.failed:
            self._ledger.upstream_error(model_name, "error_event")
        elif broken or not entry.meter.done:
            self._ledger.upstream_error(model_name, "broken_off")
            message = f"the engine of {model_name} broke off; the answer is incomplete"
            await answer.part(error_event(error_object(message, UpstreamFailed.type, UpstreamFailed.code)))
        await answer.end()

    async def _refuse(self, error: ApiError, answer: Answer, entry: Entry) -> tuple[End, int]:
        """Say what went wrong, as far as it can still be said."""
        headers = [*error.headers, JSON_HEADER, (b"x-request-id", entry.request_id.encode())]
        try:
            if answer.started:
                await answer.end()
            else:
                await answer.whole(error.status, headers, error.body())
        except ClientGone:
            return End.CANCELLED, CODE_CLIENT_GONE
        return error.end, answer.status


def find_model(snapshot: Snapshot, tenant: TenantRecord, name: str) -> Model:
    """The model, or ModelNotFound with what there is. A model that is not the tenant's does not exist for it."""
    model = snapshot.models.get(name)
    if model is not None and tenant.may_use(model.service.name):
        return model
    known = [allowed.service.served_name for allowed in snapshot.models_of(tenant)]
    listed = ", ".join(known[:MODELS_NAMED_MAX]) + (", ..." if len(known) > MODELS_NAMED_MAX else "")
    raise ModelNotFound(f"the model {name[:128]!r} does not exist; there is: {listed or 'none yet'}", param="model")


def _end_of(status: int) -> End:
    if status == 429:
        return End.REJECTED_CAPACITY
    if status in _CLIENT_FAULTS:
        return End.CLIENT_ERROR
    return End.FINISHED if status < 400 else End.FAILED


def _usage_of(body: bytes, encoding: str | None) -> int | None:
    if encoding not in (None, "identity"):
        return None
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return usage_tokens(document) if isinstance(document, dict) else None
