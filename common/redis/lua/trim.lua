-- Remove entries below an id, if a mark still exists: a server that has lost the mark may have lost entries and
-- given their ids, or lower ones, to others. The hash notes the id: a server that has lost the trim has lost this
-- note with it.
-- A ticket that is removed while a worker holds it loses its lease and its progress: Redis had lost that it was
-- settled. Without a lease no worker can settle it again.
-- Atomic against a failover between the check of the mark and the trim, and between the trim and its note.
-- KEYS: stream, marks.
-- ARGV: entry_id, mark_field, mark, trim_field, group?, progress_prefix?, progress_suffix?.
-- `trim_field` is for the id of the trim. For tickets the last three: the workers' group, and prefix and suffix of the
-- ticket's number (its id minus 1) in keys of progress.
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
  -- Before the trim: entries that are removed without this note would count as lost.
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
