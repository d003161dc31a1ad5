"""The frontend process: its parts, put together, from the first session to the last stream."""

import asyncio
import logging
import time
from collections.abc import Coroutine

from aiohttp import web
from prometheus_client import CollectorRegistry

from pdserve.config import FrontendConfig, ModelConfig, SessionConfig
from pdserve.core.errors import ErrorCode, PdserveError, StartupError
from pdserve.core.events import Role
from pdserve.core.ids import GroupIdMint, random_id
from pdserve.model_folder import load_facts, model_path
from pdserve.telemetry.loop_lag import sample_loop_lag
from pdserve.telemetry.metrics import FrontendMetrics
from pdserve.wire.cluster_client import ClusterClient
from services.frontend.admission import Admission, ServedModel
from services.frontend.app import make_app
from services.frontend.attempts import AttemptsContext
from services.frontend.connections import Site
from services.frontend.dispatcher import Dispatcher
from services.frontend.exchanges import Exchanges
from services.frontend.generate import GenerateHandler
from services.frontend.intake import Intake
from services.frontend.listener import open_listener
from services.frontend.membership import Member, Membership
from services.frontend.pages import Pages
from services.frontend.tokenize import TokenizeHandler
from services.frontend.tokenizer import Tokenizer, TokenizerPool
from services.frontend.workers import Worker

_FAREWELL_S = 2.0

_logger = logging.getLogger(__name__)


class Frontend:
    """One frontend. `start`, `serve`, then `stop`, each once.

    Attributes:
        port: that it listens on.
        exchanges: open HTTP requests.
    """

    def __init__(
        self,
        config: FrontendConfig,
        session: SessionConfig,
        model: ModelConfig,
        tokenizer: Tokenizer,
        served: ServedModel,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.port = config.port
        self.registry = CollectorRegistry()
        self.metrics = FrontendMetrics(self.registry)
        self.metrics.know_model(served.name)
        self.membership = Membership(self._make_worker)
        self.exchanges = Exchanges(config, self.metrics)
        self.dispatcher = Dispatcher(lambda: self.membership, config.max_waiting, loop.time)
        self._config = config
        self._session = session
        self._model = model
        self._mint = GroupIdMint(random_id())
        self._tokenizers = TokenizerPool(tokenizer)
        context = AttemptsContext(config, session.message_bytes, self.dispatcher, self.metrics)
        admission = Admission(served, self._tokenizers, self._mint, context)
        intake = Intake(config, self._tokenizers)
        self._generate = GenerateHandler(admission, self._tokenizers, intake, self.exchanges, config, self.metrics)
        pages = Pages(self._generate, served, self.membership, self.registry)
        app = make_app(self._generate, TokenizeHandler(served, self._tokenizers, intake), pages, config)
        # aiohttp lets a handler run on after its client has gone unless told otherwise.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_FAREWELL_S, handle_signals=False
        )
        self._controller: ClusterClient | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def load(cls, config: FrontendConfig, session: SessionConfig, model: ModelConfig) -> "Frontend":
        """A frontend for a model folder.

        Raises:
            StartupError: the folder is not usable.
        """
        folder = model_path(model.path)
        facts = await asyncio.to_thread(load_facts, folder)
        tokenizer = await asyncio.to_thread(Tokenizer.load, folder)
        context_tokens = min(model.max_context_tokens or facts.max_context_tokens, facts.max_context_tokens)
        served = ServedModel(model.name, facts.vocab_size, context_tokens, created=int(time.time()))
        return cls(config, session, model, tokenizer, served)

    async def start(self) -> None:
        """Listen, and open sessions.

        Raises:
            StartupError: the port is taken, or no workers are named.
        """
        if not self._config.workers and not self._config.controller:
            raise StartupError("no workers: set frontend.controller, or frontend.workers to their session addresses")
        listener = open_listener(self._config)
        self.port = listener.getsockname()[1]
        await self._runner.setup()
        await Site(self._runner, listener, self._config.listen_backlog, self._config.keepalive_s).start()
        if self._config.workers:
            self.membership.set_members(Member(address) for address in self._config.workers)
        else:
            self._controller = ClusterClient(self._config.controller)
            self._spawn("membership", self.membership.follow(self._controller))
        self._spawn("loop lag", sample_loop_lag(self.metrics.loop_lagged))
        _logger.info("listening on http://%s:%d", self._config.host, self.port)

    async def serve(self, stop: asyncio.Event) -> None:
        """Until `stop` is set.

        Raises:
            Exception: what broke one of the tasks, without which this would go on with workers that are long gone.
        """
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([stopped, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        for task in done - {stopped}:
            error = task.exception() or RuntimeError(f"{task.get_name()} has ended")
            _logger.error("the frontend broke", exc_info=error)
            raise error

    @property
    def stopping(self) -> bool:
        """Whether new requests are refused."""
        return self._generate.stopping

    async def stop(self) -> None:
        """Be ready no more, refuse new requests once load balancers know, let the open ones end for a while, tell the
        rest, and close.
        """
        self._generate.leaving = True
        if self._config.balancer_wait_s > 0:
            await asyncio.sleep(self._config.balancer_wait_s)
        self._generate.stopping = True
        if not await self._emptied(self._config.shutdown_s):
            self.exchanges.fail_all(PdserveError(ErrorCode.shutting_down, "the server stopped before the answer ended"))
            await self._emptied(_FAREWELL_S)
        await self._runner.cleanup()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.membership.close()
        if self._controller is not None:
            await self._controller.close()
        self._tokenizers.close()

    async def _emptied(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self.exchanges.wait_empty()
        except TimeoutError:
            return False
        return True

    def _make_worker(self, address: str, role: Role | None) -> Worker:
        instance, name = self._mint.instance, self._model.name
        return Worker(address, instance, role, name, self._session, self.dispatcher, self.metrics)

    def _spawn(self, name: str, work: Coroutine[object, object, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work, name=name))
