"""The agent consolidates by the run's schedule, one checkpoint at a time, each in a process of its own (``consolidating.py``).

Theory of operation. A commit, and a metric that comes late, are decided about in the thread that brings them, so that what is due is held
from retention before retention looks; what was consolidated before is read by the thread of the exports alone, since it may lie on another
file system, which may hang. What is due waits; one thread starts one process at a time, sees its end, looks for the request
file, and answers whoever waits. Of what is due because it is the newest or the best at most ``WAITING`` wait, and older ones give way;
what is due for its number, or was asked for, waits however long. What waits is written down, and an agent that takes the place of a killed
one goes on with it.

On several nodes of one store the first node's agent does this alone; it asks nobody and nobody waits for it. Training does not notice:
there is no message to it but news for its log.

What the end of a run is, is told in ``endings.py``. A trainer that comes before the process for it has started takes it back.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from everystep import protocol
from everystep.agent import messages
from everystep.agent.consolidating import Consolidation, Outcome
from everystep.agent.endings import ENDS, Endings
from everystep.agent.tickets import Job, Noted, Ticket, Waiter, answer, parsed, read_settings, target_of
from everystep.errors import AgentError, CheckpointError, ConfigError, NotFoundError
from everystep.repository import CheckpointKey
from everystep.schedule import Consolidate, Seen, binds, decide, to_document

if TYPE_CHECKING:
    from everystep.agent.server import AgentServer

_log = logging.getLogger(__name__)

REQUEST = "consolidate.request"
"""A file in the run's folder: the newest checkpoint is to be consolidated, or what its text names."""
LOOK_S = 10.0
"""How often the request file is looked for."""
WAITING = 2
UNREAD = 8
"""So many of the newest checkpoints are held while it is not known yet what was consolidated before."""
OTHERS_S = 30.0
"""A rank that ends waits so long for the others of its node to end as well."""
_RECORD = "exports/waiting.json"
_POLL_S = 0.1
_SEEN, _TICKETS, _WORDS_NBYTES = 256, 64, 200


class Exporter:
    """What one agent does about consolidation. Thread-safe; never called with the agent's lock held."""

    def __init__(self, server: AgentServer, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._repository = server.repository
        self._stats = server.stats
        self._clock = clock
        self._changed = threading.Condition()
        self._deciding = threading.Lock()
        self._telling = threading.Lock()
        self._settings = b""
        self._options: Consolidate | None = None
        self._attempt = 0
        self._seen: dict[CheckpointKey, Seen] = {}
        self._past: Sequence[Seen] | None = None
        """What was consolidated before, by the history beside the exports; None: not read yet, and all that is seen is held."""
        self._stale = True
        self._done: dict[str, Seen] = {}
        """Consolidated, or given up on purpose, in this agent's life."""
        self._waiting: list[Job] = []
        self._running: tuple[Job, Consolidation | None] | None = None
        self._commits = 0
        self._tickets: dict[int, Ticket] = {}
        self._next_ticket = 1
        self._waiters: list[Waiter] = []
        self._endings = Endings()
        self._ending_since: dict[int, float] = {}
        """By connection: since when it waits for the others to end; it may ask several times."""
        self._noted: tuple[Noted, ...] = ()
        self._note_at = 0.0
        self._look_at = clock() + LOOK_S
        self._told = self._news = self._closed = self._empty = self._recalled = False
        self._thread = threading.Thread(target=self._run, name="everystep-exports", daemon=True)
        self._thread.start()

    # -- what happens ----------------------------------------------------------------------------------------------------------
    @property
    def leads(self) -> bool:
        """Whether this node's agent is the one that consolidates."""
        team = self._server.team
        return team.node == 0 and (team.nodes == 1 or team.shared)

    def configure(self, settings: bytes, attempt: int, *, first: bool = True) -> None:
        """A trainer's settings (JSON of ``schedule.to_document``, or nothing) for an attempt. ConfigError when they make no sense.

        ``first``: it is the first rank of the node, whose word counts: the ranks may have other models, and so other assets.
        """
        options = read_settings(settings)
        if first:
            self._recall(options)
        with self._changed:
            if attempt != self._attempt:
                self._attempt, self._endings = attempt, Endings()
            if first:
                if options != self._options:
                    self._past, self._stale = None, True
                self._settings, self._options = settings, options
            self._poke()

    def committed(self, key: CheckpointKey, saved_at: float, late: Mapping[str, float]) -> None:
        """A checkpoint has been committed, and has ``late`` metrics besides: decide. In the thread that persists, before retention."""
        with self._told_errors(f"whether {key} is to be consolidated"):
            with self._changed:
                self._endings.concluded, self._stale = False, True
                self._commits += 1
                wanted = self._options is not None and self.leads
                self._poke()
            if wanted:
                seen = Seen(str(key), key.step, saved_at, {**self._repository.metrics(key), **late})
                with self._changed:
                    self._seen[key] = seen
                    for old in sorted(self._seen)[:-_SEEN]:
                        if not self._is_held(old):
                            del self._seen[old]
                self._decide()

    def measured(self, key: CheckpointKey) -> None:
        """Metrics have been recorded after the commit: decide again."""
        with self._told_errors(f"whether {key} is to be consolidated"):
            with self._changed:
                known = self._seen.get(key)
            if known is not None:
                seen = msgspec.structs.replace(known, metrics=self._repository.metrics(key))
                with self._changed:
                    self._seen[key] = seen
                self._decide()

    def held(self) -> frozenset[CheckpointKey]:
        """What retention has to leave: what waits, and what is being read."""
        with self._changed:
            # Where the exports are cannot be read for long: the disk is not to become full for that.
            unread = sorted(self._seen)[-UNREAD:] if self._past is None and self._options is not None else ()
            return frozenset([*(job.key for job in self._jobs() if job.key is not None), *unread])

    def ask(self, what: str, *, step: int = -1, attempt: int = 0, settings: bytes = b"") -> int:
        """Consolidate "latest" (of ``attempt`` not before ``step``), "best", a step or a key; returns the number of the ticket.

        Raises:
            ConfigError: Nobody can from here, or ``what`` is none of these.
        """
        if not self.leads:
            shared = self._server.team.shared
            text = "another node's agent does that" if shared else "each node has a store of its own, and none has all files"
            raise ConfigError(f"{what!r} cannot be consolidated here: {text}", kind="consolidate",
                              hint="everystep consolidate, where all files are")  # fmt: skip
        target, options = target_of(what), read_settings(settings)
        self._recall(options)
        self._server.feed(protocol.NewestWanted())
        with self._server.lock:
            newest = self._server.state.newest()
            if step < 0 and newest is not None:
                step, attempt = newest.step, newest.attempt
        with self._changed:
            if options is not None and self._options is None:
                self._settings, self._options = settings, options
            for number, known in self._tickets.items():
                failed = known.outcome is not None and known.outcome.error is not None
                if step >= 0 and (known.what, known.step, known.attempt) == (target, step, attempt) and not failed:
                    return number
            number = self._next_ticket
            self._next_ticket += 1
            self._tickets[number] = Ticket(target, step, attempt)
            over = [old for old, ticket in self._tickets.items() if ticket.outcome is not None]
            for old in over[: max(0, len(self._tickets) - _TICKETS)]:
                del self._tickets[old]
            self._poke()
        self._tell_occupied()
        return number

    def await_ticket(self, conn: int, request: int, ticket: int, timeout_s: float) -> None:
        """Answer this connection when the ticket is over, or with what is known after the time."""
        with self._changed:
            if ticket not in self._tickets:
                raise NotFoundError(f"the agent knows of no request {ticket} to consolidate", kind="no-ticket", hint="ask again")
            self._wait(conn, request, timeout_s, ticket)
        self._answer_at_once(timeout_s)

    def ending(self, conn: int, request: int, because: str, timeout_s: float, settings: bytes) -> None:
        """A trainer ends; answer it when nothing is to be consolidated any more, or after the time."""
        if because not in ENDS:
            raise AgentError(f"a trainer cannot end by {because!r}", kind="protocol")
        options = read_settings(settings)
        self._recall(options)
        with self._server.lock:
            peer = self._server.state.peers.get(conn)
            saved = peer is not None and peer.attempt > 0
        with self._changed:
            if options is not None and self._options is None:
                self._settings, self._options = settings, options
            self._endings.ends(conn, because, saved=saved)
            since = self._ending_since.setdefault(conn, self._clock())
            self._wait(conn, request, timeout_s if because == "done" else 0.0, None, since=since)
        self._tell_occupied()
        self._answer_at_once(timeout_s if because == "done" else 0.0)

    def left(self, conn: int, *, bye: bool, attempt: int) -> None:
        """A trainer's connection is closed. One that has neither saved (``attempt`` 0) nor said that it ends has only looked."""
        with self._changed:
            self._ending_since.pop(conn, None)
            # Of an attempt that another has followed meanwhile: it is over, and not how this one ends.
            self._endings.gone(conn, bye=bye, saved=attempt == self._attempt > 0, now=self._clock())
            self._poke()
        self._tell_occupied()

    def close(self) -> None:
        """End the process that runs; what it and others were to do stays written down."""
        with self._changed:
            self._closed = True
            running, jobs = self._running, [str(job) for job in self._waiting]
            self._poke()
        if running is not None:
            jobs.insert(0, str(running[0]))
            if running[1] is not None:
                running[1].kill()
        if jobs:
            _log.warning("the agent ends before %s was consolidated: everystep consolidate RUN does it", ", ".join(jobs))
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    # -- deciding --------------------------------------------------------------------------------------------------------------
    def _decide(self, *, final: CheckpointKey | None = None) -> None:
        """``final``: the run is over, and this is the newest."""
        with self._deciding:
            with self._changed:
                options, known, past = self._options, dict(self._seen), self._past
            if options is None or past is None:
                return
            if any(key.attempt != self._attempt for key in known):
                known = {key: one for key, one in known.items() if self._repository.in_lineage(key)}
            done = {one.key: one for one in past} | self._done
            for decision in decide(options.when, list(known.values()), list(done.values()), ended=final is not None):
                if decision.due:
                    key = CheckpointKey.parse(decision.key)
                    self._add(Job(decision.key, key, decision.reason, binds(options.when, key.step) or key == final, final=key == final))

    def _read_past(self) -> None:
        """Read what was consolidated before, when that may have changed; what came before the first time is decided about now."""
        with self._changed:
            options, first = self._options, self._past is None
            if options is None or not self._stale or not self.leads:
                return
            self._stale = False
        from everystep.consolidate.exports import Exports  # by the agents of runs that consolidate alone

        beside = options.into == "checkpoint"
        root = f"{self._server.run_url}/exports" if options.into in ("latest", "checkpoint") else options.into
        past: Sequence[Seen] = []
        with self._told_errors("what was consolidated before"):
            past = Exports(root, options.name).history(into="checkpoint" if beside else None, origin=self._repository.run_id)
        with self._changed:
            if options is self._options:
                self._past = past
        if first:
            self._decide()

    def _add(self, job: Job) -> Job:
        """Have it wait, unless it does; where too many wait the oldest gives way."""
        with self._changed:
            for known in self._jobs():
                if known.target == job.target:
                    known.stays = known.stays or job.stays
                    known.tickets += job.tickets
                    return known
            self._waiting.append(job)
            _log.info("%s is to be consolidated: %s", job, job.reason)
            passing = [one for one in self._waiting if not one.stays]
            for late in passing[:-WAITING]:
                self._waiting.remove(late)
                self._stats.count("exports_given_up")
                if late.key in self._seen:
                    self._done[late.target] = self._seen[late.key]
                _log.warning("%s is not consolidated: newer ones were due before its turn came", late)
            self._poke()
        self._tell_occupied()
        return job

    def _recall(self, options: Consolidate | None) -> None:
        """What an agent that was killed had still to do: once, before anything else waits, since what waits takes its record's place."""
        if options is None or self._recalled or not self.leads:
            return
        with self._deciding, self._told_errors("what a killed agent had still to consolidate"):
            if self._recalled:
                return
            data = b"[]"
            with contextlib.suppress(NotFoundError):
                data = self._repository.store.get(_RECORD)
            self._recalled = True
            try:
                noted = msgspec.json.decode(data, type=list[Noted])
            except msgspec.MsgspecError as error:
                _log.warning("%s cannot be read: %s", _RECORD, error)
                return
            with self._changed:
                self._noted = tuple(noted)
            for one in noted:
                key = parsed(one.key)
                if key is not None and self._repository.committed(key):
                    self._add(Job(one.key, key, one.reason, one.stays))

    def _note(self) -> None:
        """Write down what waits and runs, when that has changed."""
        with self._changed:
            noted = tuple(Noted(job.target, job.reason, job.stays) for job in self._jobs() if job.key is not None and not job.final)
            if noted == self._noted or (self._clock() < self._note_at and not self._closed):
                return
        self._note_at = self._clock() + LOOK_S  # what cannot be written is tried again, but not all the time
        if noted:
            self._repository.store.replace(_RECORD, msgspec.json.encode(noted))
        else:
            self._repository.store.delete(_RECORD)
        self._noted, self._note_at = noted, 0.0

    # -- the thread ------------------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while True:
            wait_s = 1.0
            with self._told_errors("consolidating"):
                wait_s = self._turn()
            with self._changed:
                if not self._news and not self._closed:
                    self._changed.wait(wait_s)
                self._news = False
                if not self._closed:
                    continue
            with self._told_errors("writing down what is to be consolidated"):
                self._note()
            return

    def _turn(self) -> float:
        """Do what can be done now; returns seconds until there may be more to do."""
        self._read_past()
        self._settle()
        if self._look_at <= self._clock():
            self._look_at = self._clock() + LOOK_S
            self._look()
        polls = self._resolve()
        polls = self._conclude() or polls
        self._start()
        with self._told_errors("writing down what is to be consolidated"):
            self._note()
        self._answer()
        self._tell_occupied()
        with self._changed:
            times = [self._look_at, *(waiter.until for waiter in self._waiters)]
            if self._endings.pending(self._idle_s()):
                times.append(self._endings.due_at(self._idle_s()))
            times += [waiter.since + OTHERS_S for waiter in self._waiters if waiter.ticket is None]
            now = self._clock()
            wait_s = min((at for at in times if at > now), default=now + LOOK_S) - now
        return min(wait_s, _POLL_S) if polls else wait_s

    def _look(self) -> None:
        """Take the request file."""
        if not self.leads:
            return
        store = self._repository.store
        try:
            text = store.get(REQUEST)[:_WORDS_NBYTES].decode(errors="replace").strip()
            self._empty = not text and not self._empty
            if self._empty:  # whoever makes it may be about to write into it: it is taken at the next look
                return
            store.delete(REQUEST)
        except NotFoundError:
            return
        except CheckpointError as error:  # of saves one hears soon enough
            _log.debug("%s: %s", REQUEST, error)
            return
        try:
            self.ask(text or "latest")
        except ConfigError as error:
            _log.warning("%s: %s", REQUEST, error)

    def _resolve(self) -> bool:
        """Turn tickets into jobs as soon as what they mean is on disk; whether some wait for that."""
        with self._changed:
            fresh, commits = [(number, ticket) for number, ticket in self._tickets.items() if ticket.is_open], self._commits
        if not fresh:
            return False
        with self._server.lock:
            drained = not self._server.state.undrained()
        waits = False
        for number, ticket in fresh:
            if not drained and ticket.looked == commits:  # the store is not listed again and again for what the disk is at
                waits = True
                continue
            ticket.looked = commits
            try:
                job = self._meant(ticket, drained=drained)
            except CheckpointError as error:
                self._over(ticket, Outcome(error=error))
                continue
            waits = waits or job is None
            if job is not None:
                job.tickets.append(number)
                ticket.job = self._add(job)
        return waits

    def _meant(self, ticket: Ticket, *, drained: bool) -> Job | None:
        """What a request means; None while that is on its way to the disk, where some is unless it is ``drained``."""
        newest = next(iter(self._repository.lineage()), None)
        arrived = drained or (newest is not None and (newest.attempt, newest.step) >= (ticket.attempt, ticket.step))
        if ticket.what == "latest":
            if arrived and newest is None:
                raise NotFoundError("there is no checkpoint to consolidate", kind="no-checkpoint", hint="save first")
            return Job(str(newest), newest, "asked for", stays=True) if arrived else None
        key = parsed(ticket.what)
        if ticket.what.isdigit():
            with contextlib.suppress(NotFoundError):
                key = self._repository.find(int(ticket.what))
            if key is not None and not arrived and not self._repository.in_lineage(key):
                key = None  # an abandoned timeline's; this one's may be on its way
        if key is None and not arrived and ticket.what != "best":
            return None
        return Job(ticket.what if key is None else str(key), key, "asked for", stays=True)

    def _conclude(self) -> bool:
        """The run is over: decide about its newest checkpoint. Returns whether it waits for the disk."""
        if not self._final_pending() or not self._ended():
            return False
        with self._changed:
            endings = self._endings  # a trainer that comes now gets others
            if self._clock() < endings.due_at(self._idle_s()):
                return False
        with self._server.lock:
            if self._server.state.undrained():
                return True
        try:
            self._decide_about_the_end()
        except CheckpointError as error:
            self._stats.count("exports_errors")
            _log.error("the end of the run: %s; everystep consolidate RUN --final does what is due", error)
        finally:  # whatever it was: nobody is to wait for it for ever
            with self._changed:
                endings.concluded = True
        return False

    def _decide_about_the_end(self) -> None:
        newest = next(iter(self._repository.lineage()), None)
        if newest is None:
            return
        if self._repository.newest_attempt() > self._attempt > 0:
            _log.info("the run goes on elsewhere: its end is not here")
            return
        with self._changed:
            known = newest in self._seen
        if not known:
            saved_at, metrics = self._repository.manifest(newest).saved_at, self._repository.metrics(newest)
            with self._changed:
                self._seen[newest] = Seen(str(newest), newest.step, saved_at, metrics)
        self._decide(final=newest)

    def _final_pending(self) -> bool:
        """Whether the end of the run has come, or will unless a trainer comes back, and is not decided about."""
        with self._changed:
            return self._options is not None and self.leads and self._endings.pending(self._idle_s())

    def _ended(self) -> bool:
        """Whether all trainers that are there have said that they end."""
        there = self._there()
        with self._changed:
            return self._endings.over(there)

    def _there(self) -> set[int]:
        with self._server.lock:
            return set(self._server.state.trainers())

    def _idle_s(self) -> float:
        return self._server.state.idle_s

    def _start(self) -> None:
        with self._changed:
            finals = [job for job in self._waiting if job.final]
        if finals and not self._ended():
            with self._changed:
                self._endings.concluded = False
                for job in finals:
                    job.final = False
                    if not job.tickets:  # else it was asked for besides
                        self._waiting.remove(job)
            _log.info("%s is not consolidated as the last one: a trainer goes on", finals[0])
        with self._changed:
            if self._running is not None or not self._waiting or self._closed:
                return
            job = self._waiting.pop(0)
            self._running = job, None
        settings = self._settings or msgspec.json.encode(to_document(Consolidate()))
        try:
            process = Consolidation(self._server.run_url, job.target, settings, job.reason, on_end=self._wake)
        except (CheckpointError, OSError, RuntimeError, ValueError) as error:  # no thread, no memory, a command that is none
            with self._changed:
                self._running = None
            if not isinstance(error, CheckpointError):
                error = AgentError(f"a process to consolidate {job.target} cannot be started: {error}", key=job.target, kind="no-process")
            self._finish(job, Outcome(error=error))
            return
        with self._changed:
            self._running = job, process
            if self._closed:
                process.kill()
        self._stats.count("exports_begun")

    def _settle(self) -> None:
        """See whether the process has ended, and tell."""
        with self._changed:
            job, process = self._running or (None, None)
            if self._closed or job is None or process is None or (outcome := process.outcome) is None:
                return
            self._running = None
        self._finish(job, outcome)

    def _finish(self, job: Job, outcome: Outcome) -> None:
        error: CheckpointError | None = outcome.error
        with self._changed:
            self._stale = True
            key = job.key or parsed(outcome.key)
            known = None if key is None else self._seen.pop(key, None)
            if error is None and key is not None:
                self._done[str(key)] = known or Seen(str(key), key.step, time.time())
            tickets = [self._tickets[number] for number in job.tickets if number in self._tickets]
        for ticket in tickets:
            self._over(ticket, outcome)
        if error is not None:
            self._stats.count("exports_failed")
            note = f"{job} is not consolidated: {error}"
            _log.error("%s", note)
        else:
            self._stats.count("exported")
            self._stats.count("bytes_exported", outcome.nbytes)
            self._stats.observe({"export": outcome.seconds})
            note = f"{job} is consolidated in {outcome.path} after {outcome.seconds:.1f} s ({job.reason})"
            _log.info("%s", note)
        self._stats.note("exports", note if error is not None else "")
        step, attempt = (key.step, key.attempt) if key is not None else (-1, 0)
        failed = None if error is None else messages.failure(error, 0, step=step)
        event = messages.Event(what="exported" if error is None else "not exported", step=step, attempt=attempt, tier="export",
                               nbytes=outcome.nbytes, failed=failed, note=note)  # fmt: skip
        with self._server.lock:
            ranks = {peer.rank: conn for conn, peer in self._server.state.peers.items() if peer.attempt}
        if ranks:
            self._server.tell(ranks[min(ranks)], event)

    def _over(self, ticket: Ticket, outcome: Outcome) -> None:
        with self._changed:
            ticket.outcome = outcome
            self._poke()

    # -- telling ---------------------------------------------------------------------------------------------------------------
    def _wait(self, conn: int, request: int, timeout_s: float, ticket: int | None, *, since: float = 0.0) -> None:
        self._waiters.append(Waiter(conn, request, self._clock() + timeout_s, ticket, since))
        self._poke()

    def _answer_at_once(self, timeout_s: float) -> None:
        """Who does not wait is not to wait for this room's thread either, which reads folders that may hang."""
        if timeout_s <= 0:
            self._answer()

    def _answer(self) -> None:
        """Answer whoever waits for what is over, or has waited long enough."""
        there, now = self._there(), self._clock()
        with self._changed:
            # Read in here: of an end that is told meanwhile nobody is to hear that nothing is left to do.
            others_end, pending = self._endings.over(there), self._final_pending()
            work = [str(job) for job in self._jobs()]
            work += [f"{ticket.what!r}" for ticket in self._tickets.values() if ticket.is_open]
            answered = []
            for waiter in self._waiters:
                if waiter.ticket is not None:
                    outcome = self._tickets[waiter.ticket].outcome if waiter.ticket in self._tickets else None
                    if outcome is None and now < waiter.until:
                        continue
                    answered.append((waiter, answer(waiter.request, outcome)))
                    continue
                over = not work and not (pending and others_end)
                waits_for_others = pending and not others_end and now < waiter.since + OTHERS_S
                if now < waiter.until and (not over or waits_for_others):
                    continue
                error = f"{', '.join(work)} is yet to be consolidated" if work else "the run's end is not decided about" if pending else ""
                answered.append((waiter, messages.ExportsFinished(id=waiter.request, complete=not error, error=error)))
            gone = [waiter for waiter, _ in answered]
            self._waiters = [waiter for waiter in self._waiters if waiter not in gone]
        for waiter, message in answered:
            self._server.tell(waiter.conn, message)

    def _tell_occupied(self) -> None:
        """The protocol does not end the agent while there is something to do here."""
        with self._telling:
            pending = self._final_pending()
            with self._changed:
                unresolved = any(ticket.is_open for ticket in self._tickets.values())
                undecided = self._options is not None and self._past is None and bool(self._seen)
                occupied = bool(self._waiting or self._running or unresolved or undecided or pending)
                if occupied == self._told:
                    return
                self._told = occupied
            self._server.feed(protocol.Occupied(occupied=occupied))

    def _is_held(self, key: CheckpointKey) -> bool:
        return any(job.key == key for job in self._jobs())

    def _jobs(self) -> list[Job]:
        """What runs and what waits; with the condition held."""
        return [*([self._running[0]] if self._running else []), *self._waiting]

    def _poke(self) -> None:
        """Wake the thread; with the condition held."""
        self._news = True
        self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._poke()

    @contextlib.contextmanager
    def _told_errors(self, doing: str) -> Iterator[None]:
        """Whatever goes wrong in here goes into the log: neither a commit nor the thread may end by it."""
        try:
            yield
        except CheckpointError as error:
            self._stats.count("exports_errors")
            _log.warning("%s: %s", doing, error)
        except Exception as error:  # the top of what the agent does on the side
            self._server.unexpected(doing, error)
