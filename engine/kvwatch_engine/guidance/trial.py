"""Where grammars are compiled that nobody has tried yet: `python -m kvwatch_engine.guidance.trial FD ...`.

A grammar may take minutes, much memory, or the whole stack, which ends a process. Here nothing is lost by that:

    server ──sockets──► trial process ──fork──► worker, worker ...
                         has the vocabulary      each compiles one grammar after the other, until one ends it
                         ready; gives turns

The workers have the vocabulary by copy-on-write, so that one begins within milliseconds.

Messages: first a `VocabularySource` on the socket FD, answered by a `Trial`. Then each `Allowance` on it brings a
socket of its own for one `Untried`, answered there by a `Trial`. The trial process ends when its socket does. The other
arguments are a `Rhythm`: seconds of a turn, seconds of a rest, workers to keep ready.
"""

import resource
import socket
import sys
from contextlib import suppress

import msgspec

from kvwatch_engine.guidance.linux_process import shorten_time_slice
from kvwatch_engine.guidance.messages import Silence, Trial, receive_message, send_message
from kvwatch_engine.guidance.turns import Rhythm, Turns
from kvwatch_engine.guidance.vocabulary import VocabularySource, one_line


def serve(control: socket.socket, rhythm: Rhythm) -> None:
    """Read the vocabulary, then have grammars tried by turns, until the other side ends."""
    source = msgspec.msgpack.decode(receive_message(control), type=VocabularySource)
    try:
        vocabulary = source.build()
    except Exception as error:  # whatever the library dislikes is the answer
        send_message(control, Trial(error=one_line(str(error)) or type(error).__name__))
        return
    send_message(control, Trial())
    shorten_time_slice()
    Turns(control, vocabulary, rhythm).give()


def main() -> None:
    """Serve the socket that was handed down."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # workers crash by design
    with suppress(Silence), socket.socket(fileno=int(sys.argv[1])) as control:
        serve(control, Rhythm(float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))


if __name__ == "__main__":
    main()
