"""Deliberate faults of the admin API: who gets in, what is recorded, what is changed and what reverts."""

from mutate.fault import Fault

ACCESS = "tests/unit/admin/test_admin_authorisation.py"
TOKENS = "tests/unit/admin/test_admin_tokens.py"
CHANGES = "tests/unit/admin/test_admin_changes.py"
GRPC = "tests/unit/admin/test_admin_grpc.py"
READING = "tests/unit/admin/test_admin_reading.py"
SIDECAR = "tests/integration/test_admin_sidecar.py"

ADMIN = (
    Fault(
        name="brought-for-ever",
        stands_for="The number of blocks that came with another block size stays when that has ended.",
        file="kvwatch/admin/change_desk.py",
        old="            elif key in drifted:\n",
        new="            elif key in drifted and wanted.entry.actor != OWN_NAME:\n",
        tests=(CHANGES,),
    ),
    Fault(
        name="body-without-end",
        stands_for="A body that never comes keeps its connection for ever.",
        file="kvwatch/admin/app.py",
        old="async with asyncio.timeout(BODY_SECONDS):",
        new="async with asyncio.timeout(600 + BODY_SECONDS):",
        tests=(CHANGES,),
    ),
    Fault(
        name="expired-but-known",
        stands_for="A token that has expired still lets its owner in.",
        file="kvwatch/admin/access.py",
        old="        if found.is_expired:\n",
        new="        if found.is_expired and request.method == 'TRACE':\n",
        tests=(ACCESS,),
    ),
    Fault(
        name="any-token-may",
        stands_for="Whoever may look may also change.",
        file="kvwatch/admin/access.py",
        old="        if caller.may(role):\n",
        new="        if caller.may(role) or caller.name != ANONYMOUS:\n",
        tests=(ACCESS,),
    ),
    Fault(
        name="loopback-is-trusted",
        stands_for="A change needs no token on loopback, which all containers of a pod share.",
        file="kvwatch/admin/access.py",
        old="if self._is_loopback and request.method in SAFE_METHODS:",
        new="if self._is_loopback:",
        tests=(ACCESS,),
    ),
    Fault(
        name="any-name-is-ours",
        stands_for="A page whose name was made to point to 127.0.0.1 reads everything.",
        file="kvwatch/admin/access.py",
        old="            return name in self._hosts\n",
        new="            return bool(name)\n",
        tests=(ACCESS,),
    ),
    Fault(
        name="origins-are-ignored",
        stands_for="Pages of other origins may call with the browser's help.",
        file="kvwatch/admin/access.py",
        old="        if any(origin.lower() != f",
        new="        if False and any(origin.lower() != f",
        tests=(ACCESS,),
    ),
    Fault(
        name="paths-are-decoded",
        stands_for="A listed path is found under another spelling, which a proxy in front does not know.",
        file="kvwatch/admin/routing.py",
        old="            if part != segment.encode():\n",
        new="            if unquote_to_bytes(part) != segment.encode():\n",
        tests=(ACCESS,),
    ),
    Fault(
        name="a-file-is-read-once",
        stands_for="A token that was taken out of the file stays valid until a restart.",
        file="kvwatch/admin/tokens.py",
        old="            if stamp != self._stamp:\n",
        new="            if self._stamp is None:\n",
        tests=(TOKENS,),
    ),
    Fault(
        name="a-bad-file-leaves-the-old",
        stands_for="A token file that cannot be read leaves everybody in who was in before.",
        file="kvwatch/admin/tokens.py",
        old="            self._tokens, self._stamp = (), None\n",
        new="            self._stamp = None\n",
        tests=(TOKENS,),
    ),
    Fault(
        name="grpc-reads-openly",
        stands_for="Over gRPC, which listens on another address, anybody may look.",
        file="kvwatch/admin/grpc_service.py",
        old="        if not sent:\n",
        new="        if not sent and request.method != 'GET':\n",
        tests=(GRPC,),
    ),
    Fault(
        name="the-streams-tokens-do",
        stands_for="The service of changes is guarded by nobody, or by the tokens of the event stream.",
        file="kvwatch/stream/access.py",
        old="        self._open = (HEALTH_PREFIX, *others)\n",
        new="        self._open = (HEALTH_PREFIX, '/kvwatch.v1.')\n",
        tests=(GRPC,),
    ),
    Fault(
        name="the-last-one-wins",
        stands_for="Of two changes at once the second undoes the first without knowing of it.",
        file="kvwatch/admin/config.py",
        old="        if call.headers[IF_MATCH.lower()].strip() != tag:\n",
        new="        if not tag:\n",
        tests=(CHANGES,),
    ),
    Fault(
        name="changes-stay-for-ever",
        stands_for="What was changed for an hour is forgotten and stays.",
        file="kvwatch/admin/change_desk.py",
        old="            expired = {key: lease for key, lease in desk.leases.items() if lease.until_ns <= now}\n",
        new="            expired = {key: lease for key, lease in desk.leases.items() if lease.until_ns < 0}\n",
        tests=(CHANGES,),
    ),
    Fault(
        name="changed-without-a-record",
        stands_for="A full disk stops the audit and not the changes.",
        file="kvwatch/admin/audit.py",
        old="                raise Problem(problems.NO_AUDIT, detail) from error\n",
        new="                self._logger.warning(detail, error=repr(error))\n",
        tests=(CHANGES,),
    ),
    Fault(
        name="a-dry-run-that-is-none",
        stands_for="Whoever asks what would happen makes it happen.",
        file="kvwatch/admin/config.py",
        old="        if call.query.dry_run:\n            return Answer(ChangeAnswer(is_dry_run=True, "
        "preview=await _preview(engine, changes)))\n        wanted = WantedChange(\n            entry=call.site.entry(",
        new="        wanted = WantedChange(\n            entry=call.site.entry(",
        tests=(CHANGES,),
    ),
    Fault(
        name="a-stream-begins-anew",
        stands_for="A stream that is resumed leaves out what happened meanwhile.",
        file="kvwatch/admin/event_stream.py",
        old='    return int(number) + 1, b""\n',
        new='    return log.head, b""\n',
        tests=(READING,),
    ),
    Fault(
        name="a-sidecar-lets-everybody-pass",
        stands_for="A sidecar passes on what its caller may not do, under its own token.",
        file="kvwatch/admin/app.py",
        old="        self._guard.check_role(request, caller, operation.role)\n",
        new="        if not any(each.forward for each in self._site.engines.all()):\n"
        "            self._guard.check_role(request, caller, operation.role)\n",
        tests=(SIDECAR,),
    ),
)
