"""The wire forms of OpenAI's API.

request.py      fields that chat and completions share
chat.py         chat completions
completions.py  completions
responses.py    responses; response_events.py their streams
reply.py        usage, models, errors
"""
