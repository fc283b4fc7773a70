-- Make new entries of a stream follow an id: its archive goes up to there, though Redis has lost the last of these.
-- Atomic against a worker that appends below the new last id between check and change.
-- KEYS: stream.
-- ARGV: last_known, entry_id, moves_last_id.
-- New entries follow `entry_id`. With `moves_last_id` of 1 the stream's last id becomes that.
-- Returns 1, or 0 where the stream has new entries between the two; nothing is changed then.
if #redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], ARGV[2], 'COUNT', 1) > 0 then
  return 0
end
local info = redis.pcall('XINFO', 'STREAM', KEYS[1])
if info.err or ARGV[3] ~= '1' then
  return 1
end
local function number(id, part)
  return tonumber(string.match(id, part)) or 0
end
for i = 1, #info, 2 do
  if info[i] == 'last-generated-id' then
    local ms, new_ms = number(info[i + 1], '^(%d+)'), number(ARGV[2], '^(%d+)')
    if ms < new_ms or (ms == new_ms and number(info[i + 1], '%-(%d+)') < number(ARGV[2], '%-(%d+)')) then
      redis.call('XSETID', KEYS[1], ARGV[2])
    end
  end
end
return 1
