"""`/v1/responses`: answers that are kept, and continued.

planner.py  a body, and what went before -> a plan
fields.py   what only responses have: tools, `text.format`, what is refused
items.py    items of a conversation -> the form in which they are kept, and turns
output.py   text that arrives -> items of the response, and the events that tell of them
shape.py    the response around them
store.py    kept responses: bounded, each for whoever made it
routes.py   reading and forgetting them
"""
