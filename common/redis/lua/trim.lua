-- Remove entries below an id, where a mark still stands: a server that has lost the mark may have lost entries and
-- given their ids, or lower ones, to others. The hash remembers how far it went: a server that has lost the trim
-- has lost that with it.
-- A ticket that goes while a worker holds it is nobody's any more, and its progress goes with it: Redis had lost that
-- it was settled. Nobody can settle it again, as nobody holds it.
-- Atomic against a failover between the look at the mark and the trim, and between the trim and the note of it.
-- KEYS: stream, hash.  ARGV: id, field of the hash, mark, field for how far the stream is trimmed; of tickets also the
-- workers' group, and what stands before and after the ticket's number, one less than its id, in keys of progress.
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
  -- Before the trim: entries that are gone without this note would count as lost.
  redis.call('HDEL', KEYS[2], ARGV[4])  -- as in mark.lua: HSET alone is refused by a server that is full
  redis.call('HSET', KEYS[2], ARGV[4], '"' .. ARGV[1] .. '"')
end
if ARGV[5] then
  local rows
  repeat
    -- Where the group is gone this is an error, which is a table without rows.
    rows = redis.pcall('XPENDING', KEYS[1], ARGV[5], '-', '(' .. ARGV[1], 256)
    for _, held in ipairs(rows) do
      redis.call('XACK', KEYS[1], ARGV[5], held[1])
      -- `tostring` writes large numbers with an exponent, which no key has.
      local progress = ARGV[6] .. string.format('%.0f', number(held[1], '^(%d+)') - 1) .. ARGV[7]
      redis.call('DEL', progress, progress .. ':parts')
    end
  until #rows == 0
end
return redis.call('XTRIM', KEYS[1], 'MINID', ARGV[1])
