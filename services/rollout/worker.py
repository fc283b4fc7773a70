"""Tickets in, groups out: bounded concurrency, evaluation in a lane of its own.

A finished group frees a slot. When the service stops, running groups get `streams.drain_s` to finish; the
rest is handed back, and the worker that takes a group over generates only the missing samples.

Guarantees: no sample starts before the engine holds the ticket's `min_version`, or at an older version than
the one at which the group was first started, unless the run has lost that one; after a takeover only the
missing indices are generated, each from where its recorded parts end (`sessions/parts.py`); every published
sample was generated under a lease that still held when it was published. A sample whose environment fails
does not stop the others: these are published, and it is played again at the ticket's next delivery. After the
last delivery it is published as failed, if enough others are left to train on. A sample whose prompt has a
picture that is missing or damaged is published as failed at once; a store that is away is waited for. A
ticket for which this machine cannot start something is handed back without counting the delivery.

Tasks of one lane; a process has two lanes, on one engine (`service.py`). Right of each wait: who ends it.

    run                           one; `lane_worker.py`
     | waits for a free slot        a group that ends (`_ended`), the engine's first report (`_follow_cache`)
     | waits for a ticket           Redis, or the time limit of a read, after which it reads again
     | waits out a shortage         a start on this machine that works (`context.shortage`)
     | drains once it is to stop    the groups it still has, or `streams.drain_s`, which cancels them
     |
     +-- _work                    one for each ticket that it holds; cancelled when the lease is lost
          | waits for a version     the weight follower, when the engine holds `min_version`
          | waits for pictures      the store of images, where the prompt has some
          | waits for its samples   the last of them
          |
          +-- _generate_sample    one for each missing sample
               | waits for tokens   the engine, once for each turn
               | waits for a reply  the environment, or its time limit
               |
               +-- _save          at most one (`sessions/parts.py`): keeps the tokens of a turn as it grows
                    | waits for     Redis, or the store of large payloads; the turn's end waits for it

Beside the lanes the process has one weight follower (reads `weights`, has the engine load, wakes who waits
for a version), one watchdog (ends a process whose engine finishes nothing), one recorder of activity, the
heartbeat, and a thread that renews leases.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import structlog

from tidemill.common.errors import (
    BrokenImageError,
    BrokerError,
    ConfigError,
    EngineError,
    EnvironmentFaultError,
    LeaseLostError,
    MachineFaultError,
    StoreError,
    first_cause,
)
from tidemill.common.files import StorageError
from tidemill.common.process.heartbeats import Heartbeat
from tidemill.common.process.service import ServiceContext
from tidemill.common.process.shortage import fault_in
from tidemill.common.store.claims import NO_IDS, NO_LOGPROBS, with_choices_in
from tidemill.common.streams import Delivery, Garbled
from tidemill.common.streams.lane_worker import LaneWorker
from tidemill.common.streams.log import fields_of
from tidemill.common.telemetry import metrics
from tidemill.common.telemetry.batched import Batched
from tidemill.common.wire import codec
from tidemill.common.wire.images import PICTURES_FAULT, Image
from tidemill.common.wire.keys import ROLLOUT_GROUP
from tidemill.common.wire.messages import Claim, Lane, SamplingParams, Ticket, Trajectory
from tidemill.services.rollout.containers.names import SessionName, unique_end
from tidemill.services.rollout.engines.engine import (
    Engine,
    EngineReport,
    Generation,
    GenerationRequest,
    OnTokens,
    Picture,
)
from tidemill.services.rollout.sessions.parts import Part, RecordedPlay, Recording, new_play, read_play
from tidemill.services.rollout.sessions.player import Played, Player, find_engine_fault
from tidemill.services.rollout.slots import START, UNREPORTED, CachedHistory, Slots
from tidemill.services.rollout.weight_follower import WeightFollower

if TYPE_CHECKING:
    from tidemill.common.images.store import ImageStore

log = structlog.get_logger(__name__)

OF_PROMPT = {"prompt_ids", "images"}
OF_THE_TICKET = (frozenset(Ticket.model_fields) & frozenset(Trajectory.model_fields)) - OF_PROMPT
"""Fields that a trajectory copies from its ticket; not the prompt, to which an environment may add."""
STARTED_FIELD = "version"
"""Field of the progress hash that holds the version at which the group was started."""


def _count_published(lane: Lane, samples: Sequence[tuple[int, int, float]]) -> None:
    """Count published samples of a lane in the metrics: tokens of prompt and completion, and seconds."""
    prompts, completions, seconds = zip(*samples, strict=True)
    metrics.TRAJECTORIES_PUBLISHED.labels(lane).inc(len(samples))
    metrics.PROMPT_TOKENS.labels(lane).inc(sum(prompts))
    metrics.COMPLETION_TOKENS.labels(lane).inc(sum(completions))
    metrics.GENERATION_SECONDS.labels(lane).observe_many(seconds)


class RolloutWorker(LaneWorker[Ticket]):
    def __init__(
        self, context: ServiceContext, lane: Lane, engine: Engine, follower: WeightFollower, player: Player
    ) -> None:
        super().__init__(context, lane, context.keys.prompts(lane), ROLLOUT_GROUP, Ticket)
        self.engine = engine
        self.follower = follower
        self.player = player
        config = context.config
        max_groups = config.rollout.max_groups_in_flight
        # The KV cache limits training only, so that evaluation never waits for training.
        if max_groups == "auto" and engine.is_reporting and lane is Lane.TRAIN:
            longest_sample = config.data.max_prompt_tokens + config.max_completion_tokens
            longest_sample = min(config.model.max_model_len, longest_sample)
            self.slots = Slots(START, group_tokens=config.largest_group_size * longest_sample)
            engine.on_report = self._follow_cache
        else:
            self.slots = Slots(UNREPORTED if max_groups == "auto" else max_groups)
        self._update_slots()
        self._published: Batched[tuple[int, int, float]] = Batched(partial(_count_published, lane))
        """Gathers what `_count_published` counts of each published sample."""
        self.num_turns = 0
        """Turns that the engine has answered."""
        self.num_playing = 0
        """Samples that are generated now."""
        self.faults_in_row = 0
        """Tickets that were handed on for a fault of their environment, since a sample was published."""
        self._asked: set[str] = set()
        """Ids of the requests that the engine has not answered."""
        self._images: ImageStore | None = None
        if config.images is not None:
            from tidemill.common.images import store

            self._images = store.ImageStore(context.run_dir, config.streams.claim_check_url)

    @property
    def num_free(self) -> int:
        return self.slots.num_free(len(self.running))

    @property
    def num_wanted(self) -> int:
        """Requests that the engine has not answered."""
        return len(self._asked)

    async def fetch(self, count: int) -> list[Delivery[Ticket] | Garbled]:
        """Fetch one at a time: a step's tickets arrive together, and must not all go to the first worker."""
        return await super().fetch(1)

    async def accept(self, deliveries: list[Delivery[Ticket]]) -> None:
        """Start a group, unless the service stops: then the ticket is handed back when draining."""
        if self.context.stopping.is_set():
            return
        for delivery in deliveries:
            self.begin_task(delivery, self._work(delivery)).add_done_callback(self._ended)
            self._update_slots()

    def given_up(self, delivery: Delivery[Ticket]) -> str:
        """A ticket may be delivered `streams.max_attempts` times."""
        if delivery.attempts <= self.context.config.streams.max_attempts:
            return ""
        return f"given up after {delivery.attempts - 1} deliveries"

    async def dead_letter(self, entry: Delivery[Ticket] | Garbled, error: str, attempts: int = 1) -> bool:
        """Also forget the progress of a group that will never be complete."""
        # Only once the dead letter is written, under a lease that held: a worker that took the group over
        # needs its progress.
        is_dead_lettered = await super().dead_letter(entry, error, attempts)
        if is_dead_lettered and isinstance(entry, Delivery):
            _, progress = self._keys_of(entry.message)
            await self.context.broker.execute("DEL", progress, self.context.keys.parts(progress))
        return is_dead_lettered

    def report(self, beat: Heartbeat) -> None:
        beat.counts[f"groups_{self.lane}"] = len(self.running)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.slots.end(len(self.running))
        self._update_slots()

    def _follow_cache(self, report: EngineReport) -> None:
        """Adapt the slots to the engine's report, which comes after each of its steps."""
        limit = self.slots.limit
        self.slots.report(report)
        # Only then: a first report may add slots while no group ends.
        if self.slots.limit != limit:
            self._update_slots()

    def _update_slots(self) -> None:
        """Have the loop look for a free slot again, and show the number of slots."""
        held = len(self.running)
        metrics.GROUPS_IN_FLIGHT.labels(self.lane).set(held)
        metrics.GROUP_SLOTS.labels(self.lane).set(held + max(0, self.num_free))
        self.free_slot()

    async def _work(self, delivery: Delivery[Ticket]) -> None:
        """Generate one group, and handle whatever goes wrong with it."""
        ticket = delivery.message.ticket
        try:
            await self.generate(delivery)
        except* LeaseLostError:
            log.info("group taken over by another worker", ticket=ticket)
        # Not the ticket's fault: this process is broken, or a store refuses its keys.
        except* (EngineError, BrokerError, ConfigError) as failures:
            cause = first_cause(failures)
            log.error("this process cannot go on; stopping so that it is restarted", error=str(cause))
            self.context.fail(cause)
        except* MachineFaultError:  # nor the environment's: this machine is short, which is noted already
            await self.hand_back(delivery)
        except* EnvironmentFaultError as faults:  # not the ticket's fault: another worker may succeed
            await self._hand_on(delivery, first_cause(faults))
        except* Exception as failures:
            cause = first_cause(failures)
            fault = fault_in(cause, "a sample could not be generated")
            if fault is not None:
                await self.hand_back_for(fault, delivery)
            else:
                await self.dead_letter(delivery, f"{type(cause).__name__}: {cause}", delivery.attempts)

    async def _hand_on(self, delivery: Delivery[Ticket], fault: BaseException) -> None:
        """Hand back a ticket whose environment failed, for any worker, or dead-letter it after its last
        delivery. After too many such tickets in a row this worker ends with a `ConfigError`."""
        section = self.context.config.rollout.environment
        self.faults_in_row += 1
        # `max_faults` 0: without end.
        if 0 < section.max_faults <= self.faults_in_row:
            failure = f"the environment {section.agent or section.use} failed"
            how_often = f"for {self.faults_in_row} tickets in a row, {section.attempts} times each"
            cure = "None was scored. Repair the environment, or its server, and resume the run"
            problem = f"{failure} {how_often} (rollout.environment.max_faults). The last: {fault}. {cure}"
            self.context.fail(ConfigError(problem))
            return
        if delivery.attempts >= self.context.config.streams.max_attempts:
            await self.dead_letter(delivery, f"an environment failed: {fault}", delivery.attempts)
            return
        log.warning("handing a group on: its environment fails", error=str(fault))
        await self.consumer.hand_back([delivery], is_counted=True)

    async def generate(self, delivery: Delivery[Ticket]) -> None:
        """Generate and publish the missing samples of a ticket's group.

        Raises:
            LeaseLostError: another worker has taken the ticket over.
            EnvironmentFaultError: an environment failed in every attempt.
            MachineFaultError: this machine is short of something that a sample needs.
            ValueError: the engine refuses the prompt.
            ConfigError: the store of pictures refuses the keys of this process.
        """
        ticket = delivery.message
        waited_s: float | None = None
        # Redis may lose samples that are published, and only Redis knows whether the group is complete: until
        # it says so, or the lease is lost, what is missing is generated again.
        while self.consumer.holds(delivery):
            # Read in each round: samples may have been published by a worker that held the ticket before.
            done, parts = await self._start_group(delivery)
            if waited_s is None:
                waited_s = max(0.0, time.time() - ticket.issued_at)
                metrics.STAGE_SECONDS.labels("ticket").observe(waited_s)
            # Before recorded plays are read: they are continued only where they are of this history.
            weight_history = self.follower.history
            missing = sorted(set(range(ticket.group_size)) - done)
            if not missing:
                # Without a sample: if all are published, this acknowledges the ticket.
                await self.consumer.publish_sample(delivery, *self._keys_of(ticket), None)
            pictures: tuple[Picture, ...] = ()
            try:
                if missing:
                    pictures = await self._read_pictures(ticket)
            except BrokenImageError as error:
                await self._publish_failed(delivery, missing, f"{PICTURES_FAULT}{error}")
                continue
            plays = await self._read_plays(ticket, missing, parts)
            faults: dict[int, EnvironmentFaultError | MachineFaultError] = {}
            async with asyncio.TaskGroup() as samples:
                for index in missing:
                    generating = self._generate_sample(
                        delivery, plays[index], index, weight_history, faults, pictures
                    )
                    samples.create_task(generating)
            for fault in faults.values():
                if isinstance(fault, MachineFaultError):
                    raise fault
            if faults:
                await self._give_up(delivery, faults)

    async def _give_up(
        self, delivery: Delivery[Ticket], faults: dict[int, EnvironmentFaultError | MachineFaultError]
    ) -> None:
        """After the last delivery of a ticket, publish samples whose environments failed as failed.

        Raises:
            EnvironmentFaultError: it is not the last delivery, or too few samples would be left.
        """
        ticket = delivery.message
        config = self.context.config
        is_last = delivery.attempts >= config.streams.max_attempts
        if not is_last or ticket.group_size - len(faults) < config.reward.min_group_size:
            raise next(iter(faults.values()))
        for index, fault in faults.items():
            await self._publish_failed(delivery, [index], f"an environment failed: {fault}")

    async def _publish_failed(self, delivery: Delivery[Ticket], indices: Sequence[int], reason: str) -> None:
        """Publish samples that have no completion, with the reason."""
        ticket = delivery.message
        for index in indices:
            failed = Trajectory(
                **self._of_ticket(ticket, index),
                prompt_ids=ticket.prompt_ids,
                images=ticket.images,
                completion_ids=NO_IDS,
                logprobs=NO_LOGPROBS,
                spans=((self.engine.version, 0),),
                fault=reason,
            )
            await self.consumer.publish_sample(delivery, *self._keys_of(ticket), failed)
            log.warning("a sample has failed for good", ticket=ticket.ticket, index=index, error=reason)

    async def _read_pictures(self, ticket: Ticket) -> tuple[Picture, ...]:
        """The pictures of a prompt, with their bytes. Waits for a store that is away.

        Raises:
            BrokenImageError: one is missing or damaged.
            ConfigError: the store refuses the keys of this process.
        """
        if not ticket.images:
            return ()
        if self._images is None:
            raise ValueError("its prompt has pictures, and the run's config has no section `images`")
        from tidemill.common.images.store import read_images

        files = await read_images(self._images, ticket.images)
        return tuple(map(Picture, ticket.images, files))

    async def _pictures_at(
        self, images: Sequence[Image], of_ticket: Sequence[Picture]
    ) -> tuple[Picture, ...]:
        """Pictures of a session, with their bytes: those of its ticket, and others, which were stored before
        the session named them. Raises like `_read_pictures`."""
        if not images:
            return ()
        files = {picture.image.digest: picture.png for picture in of_ticket}
        missing = [image for image in images if image.digest not in files]
        if missing:
            assert self.player.pictures is not None, "only it takes in further pictures"
            read = await self.player.pictures.read(missing)
            files |= dict(zip([image.digest for image in missing], read, strict=True))
        return tuple(Picture(image, files[image.digest]) for image in images)

    async def _start_group(self, delivery: Delivery[Ticket]) -> tuple[set[int], dict[bytes, bytes]]:
        """Wait until the engine is new enough for the group. Returns the indices of published samples, and
        the recorded parts of others."""
        ticket = delivery.message
        progress = self.context.keys.progress(ticket.ticket, self.lane)
        keys = (progress, self.context.keys.parts(progress))
        raw_fields, raw_parts = await self.context.broker.pipeline([("HGETALL", key) for key in keys])
        fields = fields_of(raw_fields)
        parts = fields_of(raw_parts)
        started_version = int(fields.pop(STARTED_FIELD.encode(), -1))
        # Before any token is sampled: the staleness bound depends on this wait.
        version = await self.follower.reach(ticket.min_version)
        if started_version < 0:
            # Does not overwrite the version of a worker that took the group over and started it earlier.
            await self.consumer.start_group(delivery, progress, version)
        elif started_version > version:
            try:
                # A version that only Redis has lost is announced again well within a lease. One that the
                # trainer has lost too never comes.
                async with asyncio.timeout(self.consumer.lease_s):
                    await self.follower.reach(started_version)
            except TimeoutError:
                log.warning(
                    "the version that a group began with is gone", ticket=ticket.ticket, was=started_version
                )
                await self.consumer.start_group(delivery, progress, self.engine.version, replaces=True)
        return {int(index) for index in fields}, parts

    async def _read_plays(
        self, ticket: Ticket, indices: Sequence[int], parts: dict[bytes, bytes]
    ) -> dict[int, RecordedPlay]:
        """The recorded plays of the missing samples, if they can be continued; else new ones."""

        def read() -> dict[int, RecordedPlay]:
            prompt_ids = ticket.prompt_ids
            images = ticket.images
            return {index: read_play(parts, index, prompt_ids, self._read_claim, images) for index in indices}

        if not parts:
            return {index: new_play(ticket.prompt_ids, ticket.images) for index in indices}
        claims = self.context.broker.claims
        plays = await claims.threads.run(read) if claims is not None else read()
        newest = max(play.newest_version for play in plays.values()) if plays else 0
        with contextlib.suppress(TimeoutError):  # as in `_start_group`
            async with asyncio.timeout(self.consumer.lease_s):
                await self.follower.reach(newest)
        # Tokens of a lost history are not continued. The last part names the trainer process that its worker
        # followed; a later one may have other weights of the same version, except of 0, the starting model.
        term = self.follower.term
        version = self.engine.version
        for index, play in plays.items():
            if play.newest_version and (play.term != term or play.newest_version > version):
                plays[index] = new_play(ticket.prompt_ids, ticket.images)
        return plays

    def _read_claim(self, claim: Claim) -> bytes:
        if self.context.broker.claims is None:
            raise ValueError("this worker knows no store of claims")
        return self.context.broker.claims.get(claim)

    def _keys_of(self, ticket: Ticket) -> tuple[str, str]:
        """Keys of the stream for the ticket's samples, and of the hash of its progress."""
        return self.context.keys.trajectories(self.lane), self.context.keys.progress(ticket.ticket, self.lane)

    def _of_ticket(self, ticket: Ticket, index: int) -> dict[str, Any]:
        """The fields of a trajectory that are known before it is generated."""
        fields = {name: getattr(ticket, name) for name in OF_THE_TICKET}
        return fields | {"index": index, "is_greedy": self._is_greedy(index), "worker": self.context.name}

    def _is_greedy(self, index: int) -> bool:
        """Whether the sample is decoded greedily, as the baseline of its group."""
        traits = self.context.config.trainer.algorithm.advantage_traits
        return index == 0 and self.lane is Lane.TRAIN and traits.has_greedy_baseline

    async def _generate_sample(
        self,
        delivery: Delivery[Ticket],
        play: RecordedPlay,
        index: int,
        weight_history: int,
        faults: dict[int, EnvironmentFaultError | MachineFaultError],
        pictures: tuple[Picture, ...],
    ) -> None:
        """Play one sample and publish it, or note its fault in `faults`.

        `weight_history` is the follower's `history` of the weights that the sample begins with, `pictures`
        are those of the ticket.
        """
        ticket = delivery.message
        started_at = time.time()
        name = f"{self.lane}-{ticket.ticket}-{index}-{delivery.attempts}"
        if play.parts:
            # A new part resets the count of deliveries. With the same name, an engine that seeds by names
            # would draw the random numbers of the recorded tokens again.
            name += f"-p{len(play.parts)}"
        numbers = count(1)
        is_greedy = self._is_greedy(index)
        history_in_cache = CachedHistory(self.slots)

        async def ask(
            ids: Sequence[int],
            sampling: SamplingParams,
            on_tokens: OnTokens | None = None,
            images: Sequence[Image] = (),
        ) -> Generation:
            number = next(numbers)
            if is_greedy:
                sampling = sampling.model_copy(update={"temperature": 0.0})
            request_id = name if number == 1 else f"{name}-t{number}"
            request = GenerationRequest(
                request_id,
                ids,
                sampling,
                is_urgent=self.lane is Lane.EVAL,
                on_tokens=on_tokens,
                ticket=ticket.ticket,
                pictures=await self._pictures_at(images, pictures),
            )
            generation = await self._ask(request)
            first_version = generation.spans[0][0]
            history_in_cache.add_turn(
                ids, first_version, generation.num_cached_tokens, self.engine.num_sleeps
            )
            return generation

        async def keep(play_name: bytes, number: int, play_part: Part) -> bool:
            # Else a sample that is dropped (`_publish`) would be continued.
            if self.follower.is_lost(weight_history):
                return False
            return await self._keep_part(delivery, index, play_name, number, play_part)

        self.num_playing += 1
        try:
            recording = Recording(ask, play, keep, self._session_of(delivery, index))
            played = await self.player.play(ticket, name, recording)
        except MachineFaultError as error:
            # At once: this worker takes no more tickets while the other samples of this one are played.
            self.context.shortage.note(error)
            faults[index] = error
            return
        except EnvironmentFaultError as error:
            faults[index] = error
            return
        except BrokenImageError as error:
            await self._publish_failed(delivery, [index], f"{PICTURES_FAULT}{error}")
            return
        finally:
            self.num_playing -= 1
        await self._publish(delivery, index, played, weight_history, started_at)

    async def _publish(
        self, delivery: Delivery[Ticket], index: int, played: Played, weight_history: int, started_at: float
    ) -> None:
        """Publish a sample that was played; one whose weights are of a lost history is dropped, and the loop
        in `generate` generates it again.

        Raises:
            LeaseLostError: another worker has taken the ticket over.
        """
        ticket = delivery.message
        # The trainer went back to an older version while this was played: its weights are no longer the
        # run's.
        if self.follower.is_lost(weight_history):
            return
        if self.lane is not Lane.TRAIN:
            played = replace(played, choices={})  # evaluation is not trained on
        # Here, where no reward has been paid for yet: such a sample is not scored.
        engine_fault = find_engine_fault(played)
        if engine_fault:
            log.warning("a sample has failed", ticket=ticket.ticket, index=index, error=engine_fault)
            played = replace(played, choices={})
        sample = Trajectory(
            **self._of_ticket(ticket, index),
            **played.fields(),
            started_at=started_at,
            finished_at=time.time(),
            fault=engine_fault,
        )
        published = await self._checked_in(sample)
        if self.follower.is_lost(weight_history):  # meanwhile: the store may have been away
            return
        await self.consumer.publish_sample(delivery, *self._keys_of(ticket), published)
        self.faults_in_row = 0
        seconds = sample.finished_at - sample.started_at
        self._published.add((len(sample.prompt_ids), len(sample.completion_ids), seconds))

    def _session_of(self, delivery: Delivery[Ticket], index: int) -> SessionName:
        """The name of a sample's session, which its containers carry."""
        run_uid = self.player.containers.run_uid
        consumer = unique_end(self.consumer.name)
        ticket = delivery.message.ticket
        return SessionName(run_uid, self.lane, delivery.entry_id, consumer, ticket, index)

    async def _keep_part(
        self, delivery: Delivery[Ticket], index: int, name: bytes, number: int, play_part: Part
    ) -> bool:
        """Append a part of a sample, or a claim to it; returns whether it is kept. `name` is that of the
        play, `number` which of its parts this is.

        Raises:
            LeaseLostError: another worker has taken the ticket over.
        """
        ticket = delivery.message
        claims = self.context.broker.claims
        max_bytes = self.consumer.max_bytes
        payload = codec.encode_payload(play_part.model_copy(update={"term": self.follower.term}))
        if max_bytes is not None and len(payload) > max_bytes:
            return False
        is_claimed = bool(play_part.choices) or (claims is not None and claims.is_large(payload))
        if claims is not None and self.lane is Lane.TRAIN and is_claimed:
            try:
                claim = await claims.threads.run(claims.put, ticket.ticket, index, payload)
                payload = codec.encode_payload(Part(claim=claim))
            except (StorageError, StoreError):
                if play_part.choices:  # which never go into Redis
                    return False
        _, progress = self._keys_of(ticket)
        return await self.consumer.append_part(delivery, progress, index, number, name + payload)

    async def _checked_in(self, sample: Trajectory) -> Trajectory:
        """The sample, or a claim to it if it is large and can be stored; its choices are always stored."""
        claims = self.context.broker.claims
        if claims is None or self.lane is not Lane.TRAIN:
            return sample
        if sample.choices is not None:
            sample = await with_choices_in(claims, sample)
        if not claims.least_bytes:  # none is large: a thread would cost a tenth of a sample's time here
            return sample
        try:
            published: Trajectory = await claims.threads.run(claims.check_in, sample)
        except (StorageError, StoreError) as error:
            log.warning("a large trajectory goes through the stream", problem=str(error))
            return sample
        return published

    async def _ask(self, request: GenerationRequest) -> Generation:
        """One generation. Requests of a lost delivery may still run, so ids are made unique."""
        request_id = request.request_id
        number = 1
        while request_id in self._asked:
            number += 1
            request_id = f"{request.request_id}-{number}"
        self._asked.add(request_id)
        try:
            generation = await self.engine.generate(replace(request, request_id=request_id))
            self.num_turns += 1
            return generation
        finally:
            self._asked.discard(request_id)
