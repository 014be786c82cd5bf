"""What the API process makes of a loaded model: template, tool format, grammar compiler."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from paceline_engine.chat_template import ChatTemplate
from paceline_engine.core_client import CoreClient
from paceline_engine.messages import CoreReady
from paceline_engine.models.loader import LoadedModel
from paceline_engine.server.engine import Serving
from paceline_engine.server.options import ServeOptions
from paceline_engine.structured.compiler import GrammarCompiler
from paceline_engine.structured.worker import Setup
from paceline_engine.tokenizer import Tokenizer
from paceline_engine.tools.parsers import detect_format


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """All of a Serving but what only the core knows."""

    model: LoadedModel
    tokenizer: Tokenizer
    template: ChatTemplate | None
    core: CoreClient
    compiler: GrammarCompiler
    tool_format: str | None
    auto_tools: bool
    trusts_templates: bool

    def with_core(self, ready: CoreReady) -> Serving:
        """Ready to serve."""
        return Serving(
            model=self.model,
            tokenizer=self.tokenizer,
            template=self.template,
            core=self.core,
            ready=ready,
            compiler=self.compiler,
            tool_format=self.tool_format,
            auto_tools=self.auto_tools,
            make_template=self._compile_template if self.trusts_templates else None,
        )

    def _compile_template(self, text: str) -> ChatTemplate:
        return ChatTemplate(text, self.model.special_tokens, datetime.now)


def make_serving(
    options: ServeOptions, model: LoadedModel, tokenizer: Tokenizer, template: str | None, core: CoreClient
) -> Prepared:
    """template: given on the command line, instead of the model's. Raises ModelError if it does not compile."""
    text = template if template is not None else model.chat_template
    setup = Setup(
        tokenizer_file=str(model.tokenizer_file),
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.config.eos_token_ids,
    )
    chosen = options.tool_call_parser
    return Prepared(
        model=model,
        tokenizer=tokenizer,
        template=ChatTemplate(text, model.special_tokens, datetime.now) if text is not None else None,
        core=core,
        compiler=GrammarCompiler(
            setup,
            model.tokenizer_digest,
            time_limit=options.grammar_compile_timeout,
            on_vocabulary=core.grammars.prepare,
        ),
        tool_format={"auto": detect_format(text), "none": None}.get(chosen, chosen),
        auto_tools=options.enable_auto_tool_choice,
        trusts_templates=options.trust_request_chat_template,
    )
