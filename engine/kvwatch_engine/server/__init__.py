"""The OpenAI-compatible server: HTTP in, tokens to the engine, text out.

    app.py            routes and middleware: `create_app`
    settings.py       limits and time-outs
    protocol/         the bodies of requests and responses, as they are on the wire
    bodies.py         reading a body under a limit, decoding it
    conversation.py   messages -> turns of text and images
    image_files.py, image_processor.py, image_prompts.py   data URLs -> pixels -> what the model sees -> its tokens
    refusals.py       parameters that are not implemented and would change the answer
    sampling.py       a request's fields -> `SamplingParams`, validated
    beams.py          what a beam search may be asked for
    guided.py         a request's fields -> the grammar that its text must keep to
    chat_template.py  messages -> the model's prompt text
    tokenizer.py      text <-> token ids, bytes of a token
    tools/            functions that the model may call: offered, described, read from its text
    tokenization.py   `/tokenize`, `/detokenize`
    prompts.py        templates and tokenisation off the event loop, lengths checked first
    detokenizer.py    token by token to text, characters never broken
    stop_strings.py   stop strings across token and stream borders
    choice.py         one sequence: text, log-probabilities, why it ended
    dispatcher.py, patience.py   outputs from the engine's thread to the event loop, and waiting for them
    generation.py     one HTTP request in the engine, from submit to the last token or the hang-up
    endpoint.py       the way of a request through all of these
    streaming.py      the answer to a request that streams
    events.py         server-sent events
    planning.py, conversation_planning.py   what the planners of all APIs share, and those of conversations
    chat.py, completions.py   two of the APIs; chat_shape.py, tool_shape.py how chats are told
    responses/        the third, whose answers are kept; truncation.py what of a conversation must go
    models.py, health.py      the small routes
    adapters.py       LoRA adapters: loading and unloading them
    drain.py          refusing new work while running requests finish
    errors.py         every error in OpenAI's shape
    request_log.py    request ids and one log line for each request

It sees the engine through `EngineClient` only and knows neither tensors nor blocks.
"""

from kvwatch_engine.server.app import create_app
from kvwatch_engine.server.dispatcher import OutputDispatcher
from kvwatch_engine.server.drain import Drain
from kvwatch_engine.server.settings import ServerSettings

__all__ = ["create_app", "OutputDispatcher", "Drain", "ServerSettings"]
