"""Prompt text of a wanted length in tokens, for a tokenizer that only the server knows.

Common words are one token each in most vocabularies; how many tokens they take at this server is measured once, by
asking it (`preparation`).
"""

import random

import msgspec

_TEXT = """
about above across after again against air all almost along also always among and animal another answer any are area
around ask away back base be because become before began begin behind being below best better between big bird black
blue boat body book both box bring brought build but call came can car care carry cause change children city class
clear close cold color come common complete could country course cover cross cut dark day deep did direct distance
do does dog done door down draw drive dry during each early earth ease east eat end enough even ever every example
eye face fact family far farm fast father feel feet few field figure final find fine fire first fish five fly follow
food foot for force form found four free friend from front full game gave get girl give glass go gold good got great
green ground group grow had half hand happen hard has have he head hear heard heart heat heavy help her here high
him his hold home horse hot hour house how hundred idea if in inch interest into island just keep kind king knew
know land language large last late laugh lead learn leave left less let letter life light like line list listen
little live long look lot love low machine made main make man many map mark may mean measure men might mile mind
minute miss money moon more morning most mother mountain move much music must name near need never new next night
north note nothing notice noun now number object of off often old on once one only open or order other our out over
own page paper part pass pattern people perhaps person picture piece place plain plan plane plant play point power
press problem produce product pull put question quick rain ran reach read ready real record red remember rest right
river road rock room round rule run
"""
WORDS = tuple(_TEXT.split())


class TextScale(msgspec.Struct, frozen=True):
    """How words become tokens at the target."""

    tokens_per_word: float = 1.0
    """Mean over `WORDS`, each with a space before it."""
    overhead_tokens: int = 0
    """Tokens of an empty prompt: begin of text, a chat template."""


def make_text(rng: random.Random, num_tokens: int, scale: TextScale) -> str:
    """Return random words of about `num_tokens` tokens, what the server adds included; at least one word."""
    return make_words(rng, max(1, int((num_tokens - scale.overhead_tokens) / scale.tokens_per_word)))


def make_words(rng: random.Random, num_words: int) -> str:
    """Return random words with a space before each, so that pieces can be put one after the other."""
    return "".join(f" {word}" for word in rng.choices(WORDS, k=num_words))
