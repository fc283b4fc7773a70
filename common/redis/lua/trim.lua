-- Remove entries below an id, where a mark still stands: a server that has lost the mark may have lost entries and
-- given their ids, or lower ones, to others. The hash remembers how far it went: a server that has lost the trim
-- has lost that with it.
-- KEYS: stream, hash.  ARGV: id, field of the hash, mark, field for how far the stream is trimmed.
-- Returns how many were removed, or -1 without the mark.
if redis.call('HGET', KEYS[2], ARGV[2]) ~= ARGV[3] then
  return -1
end
local function number(id, part)
  return tonumber(string.match(id, part)) or 0
end
local known = redis.call('HGET', KEYS[2], ARGV[4]) or '"0-0"'
local ms, new_ms = number(known, '(%d+)%-'), number(ARGV[1], '^(%d+)')
if new_ms > ms or (new_ms == ms and number(ARGV[1], '%-(%d+)') > number(known, '%-(%d+)')) then
  redis.call('HSET', KEYS[2], ARGV[4], '"' .. ARGV[1] .. '"')
end
return redis.call('XTRIM', KEYS[1], 'MINID', ARGV[1])
