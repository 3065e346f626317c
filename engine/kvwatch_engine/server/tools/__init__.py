"""Tools: functions that the model may call, written and read in the form that its family was trained on.

    offer.py     a request's tools and tool_choice, checked
    families.py  how each family writes calls: what surrounds them, a grammar that allows nothing else
    calls.py     one call written as a JSON object, read character by character
    reader.py    a text that arrives in pieces -> what is content and what belongs to calls
    prompting.py whose template knows tools, and what stands in the prompt where it does not

Knows neither HTTP nor the engine.
"""
