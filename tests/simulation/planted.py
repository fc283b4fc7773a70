"""The bugs that `mutants.py` plants: each takes one guard out, or moves a bound by one.

Where a guard stands behind another, a run may end well without it: then it is time, waste or counters that
show it. `FEW` are those of `make test-long`.
"""

from tests.simulation.mutants import Mutant

CONSUMER = "common/streams/consumer.py"
TAKEOVER = "common/streams/takeover.py"
LUA = "common/redis/lua"
ROLLOUT = "services/rollout"
BATCH = "services/trainer/batch"
DURABLE = "services/trainer/durable"
TRAINER = "services/trainer/trainer.py"

PLANTED = (
    Mutant(
        "leases are not renewed",
        CONSUMER,
        "            await asyncio.sleep(self.lease_s / RENEWALS_PER_LEASE)\n            await self.renew()",
        "            await asyncio.sleep(self.lease_s / RENEWALS_PER_LEASE)",
    ),
    Mutant(
        "a group starts before its engine holds the version that it needs",
        f"{ROLLOUT}/worker.py",
        "version = await self.follower.reach(ticket.min_version)",
        "version = self.engine.version",
    ),
    Mutant(
        "a ticket names a version that is too old by one",
        f"{BATCH}/scheduler.py",
        "return max(0, step - self.trainer.max_staleness)",
        "return max(0, step - self.trainer.max_staleness - 1)",
    ),
    Mutant(
        "the filter lets tokens pass that are too old by one",
        "services/trainer/groups/group_filter.py",
        "if step - group.min_version > self.trainer.max_staleness:",
        "if step - group.min_version > self.trainer.max_staleness + 1:",
    ),
    Mutant(
        "the filter does not look for versions of a lost history",
        "services/trainer/groups/group_filter.py",
        "if group.is_ahead or group.max_version > step:",
        "if group.max_version > step:",
    ),
    Mutant(
        "a ticket is dead-lettered after one redelivery",
        f"{ROLLOUT}/worker.py",
        "if delivery.attempts <= self.context.config.streams.max_attempts:",
        "if delivery.attempts <= 1:",
    ),
    Mutant(
        "nobody looks at Redis between mark and commit",
        TRAINER,
        "        mark = await self.reconciler.mark()\n        if await self.reconciler.check_server():\n"
        "            await self._save()\n",
        "        mark = await self.reconciler.mark()\n",
    ),
    Mutant(
        "a commit does not ask for its mark",
        TRAINER,
        "append_commit(self.context.broker, self.context.keys, commit, mark)",
        "append_commit(self.context.broker, self.context.keys, commit)",
    ),
    Mutant(
        "scores of before a loss are kept",
        "services/trainer/groups/group_filter.py",
        "in (self.trajectories, self.scores, self.trajectory_ids, self.score_ids)",
        "in (self.trajectories, self.trajectory_ids)",
    ),
    Mutant(
        "a score is joined with whatever tokens have its key",
        "common/wire/messages.py",
        "return not self.tokens_digest or not tokens_digest or self.tokens_digest == tokens_digest",
        "return True",
    ),
    Mutant(
        "trajectories of before a loss are kept",
        "services/trainer/groups/group_filter.py",
        "in (self.trajectories, self.scores, self.trajectory_ids, self.score_ids)",
        "in (self.scores, self.score_ids)",
    ),
    Mutant(
        "the answers of a read-ahead are thrown away",
        CONSUMER,
        "        if not isinstance(reply, Exception):\n            self._ahead.extend(self._hold_new(reply))",
        "        assert reply is not self._ahead",
    ),
    Mutant(
        "deliveries whose answer was lost are not read again",
        CONSUMER,
        "unanswered = [self._hold(*found) for found in await self._read_unanswered(count)]",
        "unanswered = [self._hold(*found) for found in await self._read_unanswered(0)]",
    ),
    Mutant(
        "a sample is published without its lease",
        f"{LUA}/publish_sample.lua",
        "if #held == 0 then\n  return 0\nend\n",
        "",
    ),
    Mutant(
        "a sample is published that is there already",
        f"{LUA}/publish_sample.lua",
        "if ARGV[7] ~= '' and redis.call('HEXISTS', KEYS[3], ARGV[4]) == 0 then",
        "if ARGV[7] ~= '' then",
    ),
    Mutant(
        "a group that is complete leaves its progress behind",
        f"{LUA}/publish_sample.lua",
        "  redis.call('DEL', KEYS[3])\n",
        "",
    ),
    Mutant(
        "a ticket is acknowledged one sample too early",
        f"{LUA}/publish_sample.lua",
        "if published >= tonumber(ARGV[5]) then",
        "if published >= tonumber(ARGV[5]) - 1 then",
    ),
    Mutant(
        "a score is published without the acknowledgement of its trajectory",
        f"{LUA}/complete.lua",
        "  redis.call('XACK', KEYS[1], ARGV[1], unpack(acked))\n",
        "",
    ),
    Mutant(
        "a score is published without a lease",
        f"{LUA}/complete.lua",
        "    is_held = #redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1, ARGV[2]) == 1\n",
        "    is_held = true\n",
    ),
    Mutant(
        "the last result of a group is acknowledged like the others",
        f"{LUA}/store_result.lua",
        "    if last == ARGV[3] then\n",
        "    if last == ARGV[3] and held[1][4] == 1 then\n",
    ),
    Mutant(
        "a full Redis is not waited for",
        "common/redis/broker.py",
        "    redis_errors.OutOfMemoryError,\n    redis_errors.TryAgainError,",
        "    redis_errors.TryAgainError,",
    ),
    Mutant(
        "a worker that starts takes what others could not renew",
        CONSUMER,
        "        self.takeover.be_patient()\n        self._renewal",
        "        self._renewal",
        "a worker that starts after an outage takes what others could not renew yet",
    ),
    Mutant(
        "two trainers work in one folder",
        "services/trainer/service.py",
        "            held.enter_context(lock)\n",
        "            assert lock\n",
    ),
    Mutant(
        "messages are taken from those who live",
        TAKEOVER,
        "int(self._lease_s * 1000), self._server_ms(spare_s)",
        "int(self._lease_s * 250), self._server_ms(spare_s)",
    ),
    Mutant(
        "after an outage leases are taken at once",
        TAKEOVER,
        "            self._waited_s = self._broker.waited_s\n            self.be_patient()\n",
        "            self._waited_s = self._broker.waited_s\n",
    ),
    Mutant(
        "only as many lost deliveries are found as slots are free",
        CONSUMER,
        "                self.takeover.ask_again()\n",
        "                pass\n",
    ),
    Mutant(
        "leases end when the server's clock jumps ahead",
        f"{LUA}/reclaim.lua",
        "if tonumber(ARGV[6]) > 0 and now > tonumber(ARGV[6]) then",
        "if tonumber(ARGV[6]) < 0 then",
    ),
    Mutant(
        "deliveries from the future keep their leases",
        f"{LUA}/reclaim.lua",
        "    if held[3] <= 0 then",
        "    if held[3] < -1000000000 then",
    ),
    Mutant(
        "who takes a group over generates what is there already",
        f"{ROLLOUT}/worker.py",
        "missing = sorted(set(range(ticket.group_size)) - done)",
        "missing = list(range(ticket.group_size)) if len(done) < ticket.group_size else []",
    ),
    Mutant(
        "a worker that leaves keeps what it holds",
        CONSUMER,
        "        await self.hand_back(list(self.held.values()))\n",
        "",
    ),
    Mutant(
        "a worker that leaves takes what is pending along",
        f"{LUA}/leave.lua",
        "if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) > 0 then\n  return 0\nend\n",
        "",
    ),
    Mutant(
        "a score goes out under the id of another trajectory",
        CONSUMER,
        "            if not self._is_current(delivery):\n",
        "            if False:\n",
        kept="a score is published under the id of another trajectory",
    ),
    Mutant(
        "samples of weights that the run never had are published",
        f"{ROLLOUT}/worker.py",
        "        if history != self.follower.history:\n            return",
        "        if history < 0:\n            return",
    ),
    Mutant(
        "a worker stays at a version that the run has lost",
        f"{ROLLOUT}/weight_follower.py",
        "            return manifest.term > held.term\n",
        "            return False\n",
    ),
    Mutant(
        "a trainer that starts has the number of the one before",
        f"{BATCH}/reconciler.py",
        "        term = int(path.read_text()) + 1\n",
        "        term = int(path.read_text())\n",
    ),
    Mutant(
        "lost tickets are not issued again",
        f"{BATCH}/scheduler.py",
        "        return len(await self._append_missing())\n",
        "        return 0\n",
    ),
    Mutant(
        "one step too many is admitted",
        f"{BATCH}/scheduler.py",
        "steps = min(version + 1 + self.trainer.max_staleness, self.trainer.steps)",
        "steps = min(version + 2 + self.trainer.max_staleness, self.trainer.steps)",
    ),
    Mutant(
        "a replacement keeps the step of the ticket before it",
        f"{BATCH}/scheduler.py",
        "self._next(self.next_ticket, max(old.step, step), ticket, outcome)",
        "self._next(self.next_ticket, old.step, ticket, outcome)",
    ),
    Mutant(
        "groups that would become too old are not taken first",
        f"{BATCH}/batch_assembler.py",
        "tight = next((h for h in horizons if due[h] >= capacity[h]), math.inf)",
        "tight = math.inf",
    ),
    Mutant(
        "the last entry of a key wins",
        "services/trainer/groups/group_filter.py",
        "        if index in ids or index >= self.group_size:",
        "        if index >= self.group_size or (index in ids and self.is_complete):",
    ),
    Mutant(
        "a reader goes on where it was after a loss",
        "common/streams/offset_reader.py",
        "            self.position = min(self.position, standing, key=id_order)\n",
        "",
    ),
    Mutant(
        "what a step takes is not read again after a loss",
        f"{BATCH}/batch_assembler.py",
        "        self.join.reread(self.reconciler.epoch)\n",
        "        self.join.epoch = self.reconciler.epoch\n",
    ),
    Mutant(
        "a commit does not say which groups were replaced",
        f"{BATCH}/batch_assembler.py",
        "        self.dropped.append((ticket, -1, reason))\n",
        "",
    ),
    Mutant(
        "what cannot be read is waited for as long as anything else",
        f"{BATCH}/stream_join.py",
        "            return\n        self.unread_at = time.monotonic()\n",
        "            return\n",
    ),
    Mutant(
        "what only a worker of another release could not read is waited for as long as anything else",
        f"{BATCH}/stream_join.py",
        "            self.unread_at = time.monotonic()\n        group =",
        "            pass\n        group =",
    ),
    Mutant(
        "a trim does not ask for its mark",
        f"{LUA}/trim.lua",
        "if redis.call('HGET', KEYS[2], ARGV[2]) ~= ARGV[3] then\n  return -1\nend\n",
        "",
    ),
    Mutant(
        "a trim leaves the progress of tickets that are held",
        f"{LUA}/trim.lua",
        "if ARGV[5] then",
        "if false then",
        kept="a ticket is trimmed whose acknowledgement was lost",
    ),
    Mutant(
        "entries are trimmed that are not archived",
        f"{DURABLE}/trimming.py",
        "return START if last_id == START else id_after(last_id)",
        "return None",
    ),
    Mutant(
        "entries are trimmed that the oldest checkpoint needs",
        f"{DURABLE}/checkpointing.py",
        "                await self._trim(oldest)\n",
        "                await self._trim(kept[-1])\n",
    ),
    Mutant(
        "a checkpoint's positions are those of all that was read",
        f"{BATCH}/stream_join.py",
        "return id_before(min(entry_ids, key=id_order)) if entry_ids else ",
        "return self._readers[stream].safe_position",
    ),
    Mutant(
        "a checkpoint is taken for whole by its name",
        f"{DURABLE}/checkpoint.py",
        "        _check_file(folder, name, num_bytes, checksum)\n    return",
        "        _check_file\n    return",
    ),
    Mutant(
        "commits that Redis has lost do not come back",
        TRAINER,
        "                await self._restore_commits(below=commit.step)\n",
        "                await self._restore_commits(below=0)\n",
    ),
    Mutant(
        "a run is over without its last commit",
        TRAINER,
        "        last = entry_id_of(self.config.steps - 1)\n",
        "        last = entry_id_of(self.config.steps - 2)\n",
    ),
    Mutant(
        "a curriculum forgets what the replayed steps came to",
        f"{DURABLE}/recovery.py",
        "            self.scheduler.prompts.take_commit(commit)\n",
        "",
    ),
    Mutant(
        "an evaluation on record is made once more",
        TRAINER,
        "return not all(self.recorder.has_evaluation(version, name) for name in names)",
        "return bool(names)",
    ),
    Mutant(
        "a slot is not freed when a score is published",
        "services/reward/worker.py",
        "                self.counts.count(self.lane, unpublished=-1)\n                self._release()\n",
        "                self.counts.count(self.lane, unpublished=-1)\n",
    ),
    Mutant(
        "an advantage has the sign of the group's other half",
        "services/trainer/policy/simulated_policy.py",
        'np.array(sample.advantage, dtype="<f8").tobytes()',
        'np.array(-np.asarray(sample.advantage), dtype="<f8").tobytes()',
    ),
    Mutant(
        "tickets that Redis has lost are not issued again",
        "services/trainer/batch/reconciler.py",
        "        await self.scheduler.reissue_lost()\n",
        "",
    ),
)

FEW = (
    "a group starts before its engine holds the version that it needs",
    "nobody looks at Redis between mark and commit",
    "one step too many is admitted",
    "the answers of a read-ahead are thrown away",
    "scores of before a loss are kept",
    "who takes a group over generates what is there already",
    "a sample is published without its lease",
    "a score is published without the acknowledgement of its trajectory",
    "tickets that Redis has lost are not issued again",
    "a curriculum forgets what the replayed steps came to",
)
