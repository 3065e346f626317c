"""The event stream over gRPC: what happens in an engine, for whoever is not in its process.

contract.py      messages and service, as declared structs
descriptors.py   message classes made from the declarations; nothing is compiled
codec.py         events, snapshots and the contract's structs to messages and back
subscription.py  one subscriber's way through the log
engines.py       the engines that a server offers, and which of them a caller means
snapshots.py     snapshots of the engine, shared among those who ask
access.py        addresses, tokens, certificates
server.py        the server, a part of the observatory
client.py        the client: iterates over a stream, resumes it, keeps a follower up to date
lines.py         events as lines for people and as JSON
printing.py      prints a subscription
tail.py          the command `kvwatch tail`

Importing this package imports none of them: gRPC takes a while.
"""
