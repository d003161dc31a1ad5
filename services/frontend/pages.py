"""What can be read without generating anything."""

from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry

from pdserve.core.events import Role
from pdserve.core.version import VERSION
from pdserve.telemetry.metrics import CONTENT_TYPE, render
from services.frontend.admission import ServedModel
from services.frontend.bodies import Health, ModelCard, ModelList, Readiness, Version
from services.frontend.generate import GenerateHandler
from services.frontend.membership import Membership
from services.frontend.responses import json_response


@dataclass(frozen=True, slots=True)
class Pages:
    """The handlers of GET."""

    generate: GenerateHandler
    served: ServedModel
    membership: Membership
    registry: CollectorRegistry

    async def models(self, _: web.Request) -> web.Response:
        models: ModelList = {"object": "list", "data": [self._model_card()]}
        return json_response(models)

    async def model(self, request: web.Request) -> web.Response:
        self.served.check(request.match_info["id"])
        return json_response(self._model_card())

    async def health(self, _: web.Request) -> web.Response:
        """The process is alive."""
        health: Health = {"status": "ok"}
        return json_response(health)

    async def ready(self, _: web.Request) -> web.Response:
        """A request that came now would be served."""
        ready = [worker for worker in self.membership if worker.ready]
        counts = {str(role): sum(worker.role is role for worker in ready) for role in Role}
        serves = all(counts.values()) or any(worker.colocated for worker in ready)
        readiness: Readiness = {"status": "ready", "ready": counts}
        if self.generate.leaving or not serves:
            readiness["status"] = "stopping" if self.generate.leaving else "waiting for workers"
            return json_response(readiness, status=503)
        return json_response(readiness)

    async def metrics(self, _: web.Request) -> web.Response:
        metrics = self.generate.metrics
        metrics.set_queue_depth(self.generate.admission.queue_depth)
        metrics.set_loads((worker.role, worker.load) for worker in self.membership if worker.role is not None)
        return web.Response(body=render(self.registry), headers={"Content-Type": CONTENT_TYPE})

    async def version(self, _: web.Request) -> web.Response:
        version: Version = {"version": VERSION}
        return json_response(version)

    def _model_card(self) -> ModelCard:
        return {
            "id": self.served.name,
            "object": "model",
            "created": self.served.created,
            "owned_by": "pdserve",
            "max_model_len": self.served.max_context_tokens,
        }
