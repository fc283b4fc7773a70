-- Publish one sample of a group if the lease on its ticket is still held; acknowledge the ticket with
-- the last sample.  Counting happens here, so that samples finishing at once cannot disagree on which
-- of them is the last. Atomic against a worker that takes the ticket over, and publishes the same index.
-- KEYS: prompts, trajectories, progress, parts.
-- ARGV: group, consumer, entry_id, index, group_size, schema, payload.
-- An empty payload only checks whether the group is complete.
-- Returns 0 lease lost, 1 published, 2 published and group complete, 3 the index was there already.
local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])
if #held == 0 then
  return 0
end
local result = 3
if ARGV[7] ~= '' and redis.call('HEXISTS', KEYS[3], ARGV[4]) == 0 then
  -- The sample before its note: if the server's file is cut between them, the sample is published twice, not lost.
  redis.call('XADD', KEYS[2], '*', 'v', ARGV[6], 'p', ARGV[7])
  redis.call('HSET', KEYS[3], ARGV[4], '')
  -- Its parts are numbered without gaps; readers of parts check the note first.
  local number = 0
  while redis.call('HDEL', KEYS[4], ARGV[4] .. ':' .. number) == 1 do
    number = number + 1
  end
  if held[1][4] > 0 then
    -- Deliveries count only since the last publication: a ticket is not given up because workers were taken away.
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'RETRYCOUNT', 0, 'JUSTID')
  end
  result = 1
end
-- `version` is the only field that is no index.
local published = redis.call('HLEN', KEYS[3]) - redis.call('HEXISTS', KEYS[3], 'version')
if published >= tonumber(ARGV[5]) then
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
  -- After the acknowledgement: if the file is cut between them, a hash is left that is never read. In the other
  -- order the ticket would look new.
  redis.call('DEL', KEYS[3], KEYS[4])
  return 2
end
return result
