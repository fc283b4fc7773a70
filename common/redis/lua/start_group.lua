-- Note the version at which a group was started, if the lease on its ticket is still held: a note by a worker that
-- was frozen until the group was complete would stay for ever. Atomic against the worker that takes the ticket over.
-- KEYS: prompts, progress.
-- ARGV: group, consumer, entry_id, version, replaces.
-- With `replaces` of 1, also where a version is noted.
-- Returns 0 lease lost, 1 noted, or there already.
if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2]) == 0 then
  return 0
end
redis.call(ARGV[5] == '1' and 'HSET' or 'HSETNX', KEYS[2], 'version', ARGV[4])
return 1
