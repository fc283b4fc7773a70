"""Each schedule of `known.py`, and what repaired it: taken out again, the schedule has to fail."""

from tests.simulation.mutants import Mutant

CONSUMER = "common/streams/consumer.py"
LUA = "common/redis/lua"
BATCH = "services/trainer/batch"
DURABLE = "services/trainer/durable"
TRAINER = "services/trainer/trainer.py"

REVERTED = (
    Mutant(
        "an entry that comes again does not end what was begun under it",
        CONSUMER,
        "            self._lose(entry.entry_id)\n        delivery = Delivery(",
        "            return Garbled(entry.entry_id, fields, 'known')\n        delivery = Delivery(",
        "a worker holds a ticket on which it does not work",
    ),
    Mutant(
        "a worker generates a group once, whatever Redis has lost of it",
        "services/rollout/worker.py",
        "        while self.consumer.holds(delivery):\n",
        "        for _ in range(1):\n",
        "a worker renews what it has lost",
    ),
    Mutant(
        "a version beyond its step is trained",
        "services/trainer/groups/group_filter.py",
        "        if group.is_ahead or group.max_version > step:\n",
        "        if False:\n",
        "a version beyond its step",
    ),
    Mutant(
        "a commit is appended though those before it are lost",
        f"{DURABLE}/commits.py",
        "        if commit.step and id_order(last) < id_order(entry_id_of(commit.step - 1)):\n",
        "        if False:\n",
        "two commits are lost at once",
    ),
    Mutant(
        "the greatest versions are kept, also of a history that is lost",
        "services/trainer/weights/store.py",
        "lost = [version for version in versions if newest is not None and version > newest]",
        "lost = [version for version in versions if version < 0]",
        "versions of a future that is lost",
    ),
    Mutant(
        "scores of deliveries that came once more are published with the others",
        CONSUMER,
        "            kept = list(compress(deliveries, current)), list(compress(payloads, current))\n",
        "            kept = deliveries[:0], payloads[:0]\n",
        "a sleeper wakes up after two failovers",
    ),
    Mutant(
        "a torn checkpoint counts among those that are kept",
        f"{DURABLE}/checkpoint.py",
        "                whole.append(_verified_state(self.folder / version_name(version), version))\n",
        "                found = _read_document(self.folder / version_name(version) / STATE_FILE)\n"
        "                whole.append(_state_of(found, version))\n",
        "a torn checkpoint is none that is kept",
    ),
    Mutant(
        "strangers stay among the weights",
        f"{BATCH}/reconciler.py",
        "if await remove_unexpected(self.broker, self.keys, self.keys.weights, WeightManifest):",
        "if False:",
        "a stranger among the weights",
    ),
    Mutant(
        "strangers stay among the commits",
        f"{BATCH}/unexpected_entries.py",
        "    if not unexpected and not own and not _is_beyond(newest):\n        return 0\n",
        "    if message_type is Commit:\n        return 0\n",
        "a stranger among the commits",
    ),
    Mutant(
        "numbered entries are appended wherever the stream ends",
        f"{LUA}/append_after.lua",
        "if last ~= ARGV[1] then\n  return 0\nend\n",
        "",
        "tickets are lost while they are issued",
    ),
    Mutant(
        "nobody notices that Redis was emptied",
        f"{BATCH}/reconciler.py",
        '        if await self.broker.execute("HGET", self.keys.state, REGISTRATION) == self._token:\n',
        "        if self._token:\n",
        "Redis is emptied",
    ),
    Mutant(
        "nobody notices that Redis was emptied, and everybody dies",
        f"{BATCH}/reconciler.py",
        '        if await self.broker.execute("HGET", self.keys.state, REGISTRATION) == self._token:\n',
        "        if self._token:\n",
        "Redis is emptied, and everybody dies",
    ),
    Mutant(
        "versions stay announced that no checkpoint has",
        f"{BATCH}/reconciler.py",
        "        if not lost:\n            return\n",
        "        if lost or not lost:\n            return\n",
        "Redis is emptied before there is a checkpoint",
    ),
    Mutant(
        "the run's config does not come back with its mark",
        f"{BATCH}/reconciler.py",
        '            ("SET", self.keys.config, config.model_dump_json(), "NX"),\n',
        "",
        "Redis is emptied, and a server that has not seen it takes over",
    ),
    Mutant(
        "a commit of lost records is appended",
        TRAINER,
        "append_commit(self.context.broker, self.context.keys, commit, mark)",
        "append_commit(self.context.broker, self.context.keys, commit)",
        "a commit of what Redis has lost",
    ),
    Mutant(
        "a run says that it is finished, whatever commits the server has",
        f"{LUA}/finish.lua",
        "info[i] == 'last-generated-id' and info[i + 1] ~= ARGV[1] then",
        "false then",
        "a run is finished on a server that lacks its last commit",
    ),
    Mutant(
        "a run says once that it is finished",
        TRAINER,
        "            if await finish_state(self.context.broker, self.context.keys, last, **state):\n"
        "                return\n",
        "            await finish_state(self.context.broker, self.context.keys, last, **state)\n"
        "            return\n",
        "a run is finished right after a failover",
    ),
    Mutant(
        "a trainer that is stopped writes a last checkpoint, come what may",
        TRAINER,
        "            with contextlib.suppress(StoppedError):\n                await self._save()\n",
        "            await self._save()\n",
        "the trainer is stopped while the disk is full",
    ),
    Mutant(
        "a reader's trail is trusted as soon as it is read",
        "common/streams/offset_reader.py",
        "        return [rung for rung in self.rungs if id_order(rung[0]) <= id_order(self._sure_to)]\n",
        "        return list(self.rungs)\n",
        "a reader goes on before the failover is noticed",
    ),
    Mutant(
        "a trim is done on another server than it was decided on",
        f"{LUA}/trim.lua",
        "if redis.call('HGET', KEYS[2], ARGV[2]) ~= ARGV[3] then\n  return -1\nend\n",
        "",
        "a trim is decided on one server and done on another",
    ),
    Mutant(
        "a stream that has vanished is an error to who looks for strays",
        f"{LUA}/move_aside.lua",
        "return string.find(groups.err, 'no such key', 1, true) and -1 or groups",
        "return groups",
        "Redis is emptied while it is looked for strays",
    ),
    Mutant(
        "during an evaluation nobody looks at Redis",
        f"{BATCH}/reconciler.py",
        "            await asyncio.sleep(WATCH_S)\n            await self.check_server()\n",
        "            await asyncio.sleep(WATCH_S)\n",
        "Redis is emptied during an evaluation, and a worker starts",
    ),
    Mutant(
        "config and mark are set one after the other",
        f"{BATCH}/reconciler.py",
        "        await self.broker.pipeline(unit, atomic=True)\n",
        "        for command in unit[::-1]:\n            await self.broker.execute(*command)\n",
        "Redis loses the config and keeps the mark",
    ),
    Mutant(
        "tickets that the stream has passed over are waited for",
        f"{DURABLE}/recovery.py",
        "        self.skipped = [t for t in await self.scheduler.find_skipped() if t not in trained]\n",
        "        self.skipped = []\n",
        "a ticket that the stream has passed over",
    ),
    Mutant(
        "a replay asks of copies when their version was committed",
        "common/history/groups.py",
        "        if self.trajectories.setdefault(sample.index, sample) is not sample:\n",
        "        self.trajectories[sample.index] = sample\n        if False:\n",
        "a stranger's copy comes after its group was trained",
    ),
    Mutant(
        "an evaluation is trimmed before a checkpoint stands for its version",
        TRAINER,
        "        if not await self.reconciler.check_server():\n"
        "            await self.evaluator.trim(version)\n",
        "        await self.evaluator.trim(version)\n",
        "an evaluation is trimmed whose version goes back",
    ),
    Mutant(
        "after a loss nobody looks for deliveries from the future",
        "common/streams/takeover.py",
        "        self._place = EVERYWHERE  # a server",
        "        pass  # a server",
        "deliveries from the future come back",
    ),
    Mutant(
        "a lost delivery is sent though its id may be another one's",
        CONSUMER,
        "        return not is_lost and ",
        "        return ",
        "a lost delivery is completed under the id of another one",
    ),
    Mutant(
        "a replay takes whatever samples of its tickets are there",
        f"{DURABLE}/recovery.py",
        "commit.samples_digest != samples_digest(commit.trained_keys, groups)",
        "False",
        "a step is replayed with samples that were generated after it",
    ),
    Mutant(
        "a run is finished where the commits end anywhere behind the last one",
        f"{LUA}/finish.lua",
        "info[i + 1] ~= ARGV[1]",
        "tonumber(string.match(info[i + 1], '^%d+')) < tonumber(string.match(ARGV[1], '^%d+'))",
        "a stranger hides that the last commit is lost",
    ),
    Mutant(
        "tickets of an evaluation leave their progress when they are trimmed",
        f"{DURABLE}/trimming.py",
        "        for lane in Lane:\n            if stream.key",
        "        for lane in (Lane.TRAIN,):\n            if stream.key",
        "an evaluation is trimmed while a worker holds a ticket of it",
    ),
    Mutant(
        "tickets of evaluations stay that a lost history has issued",
        TRAINER,
        "        await self.evaluator.take_back(self.version)\n",
        "",
        "a trainer comes to versions again whose evaluations are there",
    ),
    Mutant(
        "a server is known before its restart is noted",
        f"{BATCH}/reconciler.py",
        "            self._note_restart()\n            await self._rewrite_file()\n",
        "            await self._rewrite_file()\n            await self._register_if_lost()\n"
        "            self._note_restart()\n",
        "a question to a restarted server has no answer, and another one is asked",
    ),
    Mutant(
        "what a refused score has acknowledged is waited for like any other",
        f"{BATCH}/stream_join.py",
        "            if group is not None and group.is_of_other_tokens(one.message):\n",
        "            if False:\n",
        "the score of a lost trajectory acknowledges another one",
    ),
    Mutant(
        "reading what is pending counts as a delivery",
        CONSUMER,
        '("XRANGE", self.key, entry_id, entry_id)',
        '("XCLAIM", self.key, self.group, self.name, 0, entry_id)',
        "answers with what is pending are lost again and again",
    ),
)
