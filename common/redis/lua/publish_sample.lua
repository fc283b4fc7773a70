-- Publish one sample of a group if the lease on its ticket is still held; acknowledge the ticket with
-- the last sample.  Counting happens here, so that samples finishing at once cannot disagree on which
-- of them is the last. Atomic against a worker that takes the ticket over, and publishes the same index.
-- KEYS: prompts, trajectories, the group's progress hash, the group's parts.
-- ARGV: group, consumer, ticket's entry id, index, group size, schema, payload; without a payload it only looks
-- whether the group is complete.
-- Returns 0 lease lost, 1 published, 2 published and group complete, 3 the index was there already.
local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])
if #held == 0 then
  return 0
end
local result = 3
if ARGV[7] ~= '' and redis.call('HEXISTS', KEYS[3], ARGV[4]) == 0 then
  -- The sample before the note of it: of a unit that is cut off in its file, a later restart does the first half.
  redis.call('XADD', KEYS[2], '*', 'v', ARGV[6], 'p', ARGV[7])
  redis.call('HSET', KEYS[3], ARGV[4], '')
  -- Its parts are numbered without gaps; who reads them looks at the note first.
  local number = 0
  while redis.call('HDEL', KEYS[4], ARGV[4] .. ':' .. number) == 1 do
    number = number + 1
  end
  if held[1][4] > 0 then
    -- Deliveries count only since something was published: nobody is blamed for workers that were taken away.
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'RETRYCOUNT', 0, 'JUSTID')
  end
  result = 1
end
-- `version` is the only field that is no index.
local published = redis.call('HLEN', KEYS[3]) - redis.call('HEXISTS', KEYS[3], 'version')
if published >= tonumber(ARGV[5]) then
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
  -- Behind the acknowledgement: where the file ends between them, a hash is left that nobody reads. The other
  -- way round the ticket would look new.
  redis.call('DEL', KEYS[3], KEYS[4])
  return 2
end
return result
