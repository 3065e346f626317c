"""`kvwatch doctor URL`: what is the matter with the engines behind a metrics page?

- pages.py     a page's text to samples, engine by engine; pages of vLLM and SGLang too
- asking.py    fetches pages, or a diagnosis that the target has made itself
- report.py    findings as text
- command.py   the command
"""
