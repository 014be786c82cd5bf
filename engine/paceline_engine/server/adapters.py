"""LoRA adapters of a running engine: loaded and unloaded on the admin port (vLLM's paths), served as models."""

from __future__ import annotations

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from paceline_engine.core_client import CoreError
from paceline_engine.server.engine import Engine
from paceline_engine.server.errors import ApiError, invalid
from paceline_engine.server.parsing import parsed
from paceline_engine.server.schemas import StrictModel


class LoadAdapter(StrictModel):
    """lora_path: folder with adapter_config.json and adapter_model.safetensors, as PEFT writes it."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1)


class UnloadAdapter(StrictModel):
    """Name as it was loaded."""

    lora_name: str


def add_adapter_routes(app: FastAPI, engine: Engine) -> None:
    """Add the routes to the admin app."""

    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        body = await parsed(engine, request, LoadAdapter)
        name = body.lora_name
        if name == engine.model_name:
            raise invalid(f"lora_name: {name!r} is the model itself: give another name", "lora_name")
        try:
            values = await engine.serving.core.command(
                "load_adapter", name=name, path=body.lora_path.removeprefix("file://")
            )
        except CoreError as error:
            # The core gives the name up before it loads what replaces it, and keeps it while a request uses it.
            if "requests use" not in str(error):
                engine.adapters.pop(name, None)
            raise _refused(error, "lora_path") from error
        engine.adapters[name] = engine.created_now()
        return JSONResponse({"lora_name": name, "digest": values["digest"]})

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        body = await parsed(engine, request, UnloadAdapter)
        if body.lora_name not in engine.adapters:
            message = f"the adapter {body.lora_name!r} is not loaded"
            raise ApiError(404, message, param="lora_name", code="model_not_found")
        try:
            await engine.serving.core.command("unload_adapter", name=body.lora_name)
        except CoreError as error:
            raise _refused(error, "lora_name") from error
        engine.adapters.pop(body.lora_name, None)
        return JSONResponse({"lora_name": body.lora_name})


def _refused(error: CoreError, param: str) -> ApiError:
    """409 where waiting helps, else 400: in both the core's own line."""
    if "requests use" in str(error):
        return ApiError(409, str(error), kind="conflict", param="lora_name", code="refused_by_core")
    return invalid(str(error), param, "invalid_value")
