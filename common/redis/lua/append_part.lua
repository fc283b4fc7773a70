-- Keep the next part of a sample that is being generated, if the lease on its ticket is still held.
-- Atomic against a worker that takes the ticket over: it reads every part that was kept, and none is added later.
-- KEYS: prompts, progress, parts.
-- ARGV: group, consumer, entry_id, index, field, field_before, payload.
-- `field_before` is that of the part before it, or ''. The first 16 bytes of a payload identify its play: parts of two
-- plays never follow each other.
-- Returns 0 lease lost, 1 kept, 2 kept in place of an older one, 3 not kept: Redis has lost the part before it, or
-- the sample is published.
local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])
if #held == 0 then
  return 0
end
if redis.call('HEXISTS', KEYS[2], ARGV[4]) == 1 then
  return 3
end
if ARGV[6] ~= '' then
  local before = redis.call('HGET', KEYS[3], ARGV[6])
  if not before or string.sub(before, 1, 16) ~= string.sub(ARGV[7], 1, 16) then
    return 3
  end
end
-- A play that begins again overwrites the parts of the one before, and only a part beyond these is progress: a
-- session that always kills its worker at the same place is given up in the end.
if redis.call('HSET', KEYS[3], ARGV[5], ARGV[7]) == 0 then
  -- The parts after the replaced one do not follow this one, though they may be of the same play: where a part could
  -- not be read, its play goes on from the part before. The fields stay: they show how far a play had come.
  local number = tonumber(string.match(ARGV[5], '%d+$')) + 1
  local field = ARGV[4] .. ':' .. number
  while (redis.call('HGET', KEYS[3], field) or '') ~= '' do
    redis.call('HSET', KEYS[3], field, '')
    number = number + 1
    field = ARGV[4] .. ':' .. number
  end
  return 2
end
if held[1][4] > 0 then
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'RETRYCOUNT', 0, 'JUSTID')
end
return 1
