"""The links of a decode rank at their handlers: who may say what, what is answered, and what a broken or lost link means."""

from __future__ import annotations

import contextlib

import pytest
from decode_fakes import ROUTER, WRITER, FakeTokenLink, decode_rank, run, settle, until

from headrace import errors
from headrace.clock import FakeClock
from headrace.protocol import common
from headrace.protocol import decode as p
from headrace.protocol.link import Done
from services.decode.links import RouterCommands, RouterTokenLinks, WriterCommands, Writers

LOST = errors.Unavailable("it did not come back", reason="LINK_LOST")


class OneEnd(FakeTokenLink):
    """This rank's end of a link: remembers what it is told to answer and to ask."""

    def __init__(self, peer, handler):
        super().__init__(peer)
        self.handler, self.answers, self.asked = handler, {}, []
        self.said: object = p.Stopped(p.StopState.DRAINED)
        handler.on_open(self)

    def hears(self, *bodies):
        """Items of the peer, in order; what is raised is the answer."""
        for body in bodies:
            number = len(self.answers) + 1
            self.answers[number] = None
            try:
                self.handler.on_item(self, number, body)
            except errors.HeadraceError as error:
                self.answer(number, error)
        return number

    def answer(self, number, body):
        assert not self.is_lost and self.answers[number] is None
        self.answers[number] = body

    async def ask(self, body, deadline):
        self.asked.append((body, deadline.left_s()))
        if isinstance(self.said, errors.HeadraceError):
            raise self.said
        return self.said

    def ends(self, error=LOST):
        self.lose(error)
        self.handler.on_lost(self, error)


class Links:
    """The three kinds of one rank."""

    def __init__(self, rank):
        self.rank, self.core = rank, rank.core
        self.commands, self.tokens, self.writers = (
            kind(rank.core) for kind in (RouterCommands, RouterTokenLinks, WriterCommands)
        )
        self.writer = OneEnd(WRITER, self.writers)

    def router(self, who=ROUTER):
        """Its token link and its decode link."""
        return OneEnd(who, self.tokens), OneEnd(who, self.commands)

    async def start(self, router, name="r", **options):
        """A running request."""
        command = self.rank.command(name, **options)
        number = router.hears(command)
        promise = self.rank.signer.read(router.answers[number])
        begun = self.writer.hears(p.BeginCommand(promise.reservation_id))
        assert self.writer.answers[begun] == p.Renewed(10.0)
        number = self.writer.hears(self.rank.commit_command(command, promise, self.rank.rows.push(promise)))
        await until(lambda: self.writer.answers[number] is not None)
        assert isinstance(self.writer.answers[number], p.CommitAccepted)
        return command, promise


@contextlib.asynccontextmanager
async def links(**options):
    async with decode_rank(connected=False, **options) as rank:
        yield Links(rank)


@run
async def test_commands_are_answered_by_their_numbers_and_tokens_go_the_other_way():
    async with links() as mesh:
        tokens, commands = mesh.router()
        command, promise = await mesh.start(commands, max_tokens=3)
        await mesh.rank.step(2)
        assert [r.token_ids for frame in tokens.frames for r in frame.records] == [(101,), (102,)]
        renewed = mesh.writer.hears(p.RenewCommand(promise.reservation_id))
        assert mesh.writer.answers[renewed] == p.Renewed(10.0)  # its commit is still known
        released = commands.hears(p.ReleaseCommand("r", 1, ()))
        assert commands.answers[released] == Done()
        await mesh.rank.all_free()


@run
async def test_a_reserve_that_waits_is_answered_when_there_is_room():
    async with links(num_blocks=3) as mesh:
        _, commands = mesh.router()
        first = commands.hears(mesh.rank.command("a"))
        second = commands.hears(mesh.rank.command("b"))
        assert isinstance(commands.answers[first], p.Reservation) and commands.answers[second] is None
        commands.hears(p.ReleaseCommand("a", 1, ()))
        assert isinstance(commands.answers[second], p.Reservation)
        commands.hears(p.ReleaseCommand("b", 1, ()))
        await mesh.rank.all_free()


@run
async def test_what_does_not_belong_on_a_link_is_refused():
    async with links() as mesh:
        tokens, commands = mesh.router()
        for link, body in ((tokens, p.RenewCommand("x")), (commands, p.RenewCommand("x")), (mesh.writer, Done())):
            assert isinstance(link.answers[link.hears(body)], errors.InvalidRequest)


@run
async def test_refusals_are_answers():
    async with links() as mesh:
        commands = OneEnd(ROUTER, mesh.commands)
        refused = commands.answers[commands.hears(mesh.rank.command())]
        assert isinstance(refused, errors.Unavailable) and refused.reason == "NO_TOKEN_LINK"
        unknown = mesh.writer.hears(p.BeginCommand("no such reservation"))
        assert isinstance(mesh.writer.answers[unknown], errors.StaleAttempt)


@run
async def test_only_the_peer_that_was_named_may_write():
    async with links() as mesh:
        _, commands = mesh.router()
        command = mesh.rank.command()
        promise = mesh.rank.signer.read(commands.answers[commands.hears(command)])
        another = OneEnd(common.WorkerIdentity(WRITER.address, "another-epoch"), mesh.writers)
        commit = mesh.rank.commit_command(command, promise, ())
        for body in (p.BeginCommand(promise.reservation_id), p.RenewCommand(promise.reservation_id), commit):
            assert isinstance(another.answers[another.hears(body)], errors.StaleEpoch)
        commands.hears(p.ReleaseCommand("r", 1, ()))
        await mesh.rank.all_free()


@run
async def test_either_lost_link_of_a_router_ends_its_requests():
    for which in (0, 1):
        async with links(num_blocks=6) as mesh:
            pair = mesh.router()
            await mesh.start(pair[1])
            pair[1].hears(mesh.rank.command("reserved"))
            waiting = pair[1].hears(mesh.rank.command("waiting"))
            pair[which].ends()
            await mesh.rank.all_free()
            if which == 0:
                assert pair[1].answers[waiting].reason == "LINK_LOST"
            _, commands = mesh.router()
            await mesh.start(commands, "after")
            commands.hears(p.ReleaseCommand("after", 1, ()))
            await mesh.rank.all_free()


@run
async def test_a_new_decode_link_of_a_router_ends_what_was_asked_over_the_old_one():
    async with links() as mesh:
        _, old = mesh.router()
        await mesh.start(old, "old")
        new = OneEnd(ROUTER, mesh.commands)
        await mesh.rank.all_free()
        await mesh.start(new, "new")
        old.ends()  # told late
        await settle()
        assert mesh.core.ledger().running_requests == 1
        new.ends()
        await mesh.rank.all_free()


@run
async def test_a_link_that_is_only_broken_ends_nothing():
    async with links() as mesh:
        tokens, commands = mesh.router()
        await mesh.start(commands, max_tokens=3)
        for link in (tokens, commands, mesh.writer):
            link.is_open = False
            link.handler.on_broken(link)
        await mesh.rank.step()
        for link in (tokens, commands, mesh.writer):
            link.is_open = True
            link.handler.on_open(link)
        await mesh.rank.step()
        assert [r.token_ids for frame in tokens.frames for r in frame.records] == [(101,), (102,)]
        await mesh.rank.all_free()


@run
async def test_an_answer_after_its_link_was_lost_goes_nowhere():
    async with links() as mesh:
        _, commands = mesh.router()
        command = mesh.rank.command()
        promise = mesh.rank.signer.read(commands.answers[commands.hears(command)])
        mesh.writer.hears(p.BeginCommand(promise.reservation_id))
        number = mesh.writer.hears(mesh.rank.commit_command(command, promise, mesh.rank.rows.push(promise)))
        mesh.writer.ends()
        await until(lambda: mesh.core.ledger().running_requests == 1)  # what is committed goes on
        assert mesh.writer.answers[number] is None
        await mesh.rank.step(3)
        await mesh.rank.all_free()


class OneServer:
    """Finds the links it was given."""

    def __init__(self, *ends):
        self.ends = {link.peer.epoch: link for link in ends}

    def find(self, epoch):
        return self.ends.get(epoch)


@run
async def test_a_writer_is_asked_to_stop_over_its_own_link():
    async with links() as mesh:
        writers = Writers(FakeClock())
        with pytest.raises(errors.Unavailable):
            await writers.stop(WRITER, "one", 6.0)
        writers.links = OneServer(mesh.writer)
        assert await writers.stop(WRITER, "one", 6.0) is p.StopState.DRAINED
        assert mesh.writer.asked == [(p.StopCommand("one", 6.0), 7.0)]
        mesh.writer.said = errors.DeadlineExceeded("silence")
        with pytest.raises(errors.DeadlineExceeded):
            await writers.stop(WRITER, "one", 6.0)
        for gone in (common.WorkerIdentity(WRITER.address, "another-epoch"), WRITER):
            mesh.writer.is_open = gone is not WRITER
            with pytest.raises(errors.Unavailable) as caught:
                await writers.stop(gone, "one", 6.0)
            assert caught.value.reason == "NO_WRITER_LINK"
