"""Random JSON Schemas of bounded size, whose every document is bounded as well: a text that keeps to one must end."""

from random import Random

Schema = dict[str, object]


def random_schema(random: Random) -> Schema:
    """Return an object schema; some parts are named in `$defs` and referred to."""
    definitions: dict[str, object] = {f"part{number}": _value(random, 1) for number in range(random.randint(0, 2))}
    schema = _object(random, 3, list(definitions))
    return schema | {"$defs": definitions} if definitions else schema


def _value(random: Random, depth: int, names: list[str] | None = None) -> Schema:
    if names and random.random() < 0.2:
        return {"$ref": f"#/$defs/{random.choice(names)}"}
    kinds = [_text, _integer, _enumeration, _constant, _simple]
    if depth > 0:
        kinds += [_nested, _array, _either]
    kind = random.choice(kinds)
    if kind is _nested:
        return _object(random, depth - 1, names)
    if kind is _array:
        return _list(random, depth - 1, names)
    if kind is _either:
        return {"anyOf": [_value(random, depth - 1, names) for _ in range(random.randint(2, 3))]}
    return kind(random)


def _object(random: Random, depth: int, names: list[str] | None) -> Schema:
    keys = random.sample(["name", "größe", "a b", "id", 'quo"te', "x", "list", "日本"], random.randint(1, 4))
    return {
        "type": "object",
        "properties": {key: _value(random, depth, names) for key in keys},
        "required": [key for key in keys if random.random() < 0.7],
        "additionalProperties": False,
    }


def _list(random: Random, depth: int, names: list[str] | None) -> Schema:
    least = random.randint(0, 2)
    return {
        "type": "array",
        "items": _value(random, depth, names),
        "minItems": least,
        "maxItems": least + random.randint(0, 2),
    }


def _text(random: Random) -> Schema:
    patterns = ["^[a-f]{2,6}$", "^(yes|no|maybe)$", "^[A-Z][a-z]{0,4}-[0-9]{2}$"]
    if random.random() < 0.4:
        return {"type": "string", "pattern": random.choice(patterns)}
    if random.random() < 0.3:
        return {"type": "string", "format": random.choice(["date", "time", "uuid"])}
    least = random.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + random.randint(0, 6)}


def _integer(random: Random) -> Schema:
    least = random.randint(-1000, 1000)
    return {"type": "integer", "minimum": least, "maximum": least + random.randint(0, 5000)}


def _enumeration(random: Random) -> Schema:
    return {"enum": random.sample(["red", "grün", 7, -1.5, None, True, ["a", 1], {"k": "v"}], random.randint(1, 4))}


def _constant(random: Random) -> Schema:
    return {"const": random.choice(["fixed", 42, False, None, [1, 2], {"deep": {"er": 1}}])}


def _simple(random: Random) -> Schema:
    return {"type": random.choice(["boolean", "null"])}


def _nested(random: Random) -> Schema:
    return _object(random, 0, None)


def _array(random: Random) -> Schema:
    return _list(random, 0, None)


def _either(random: Random) -> Schema:
    return {"anyOf": [_simple(random), _text(random)]}
