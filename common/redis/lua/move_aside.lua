-- Move entries that no service of the run wrote out of a numbered stream, and lower its last id again, as one unit.
-- Otherwise the stream would refuse all further numbers of the run. Atomic against the trainer, which appends, and
-- against workers, which read and acknowledge: no client sees the stream without its entries or its last id.
-- KEYS: stream, dead.
-- ARGV: schema, floor, entries... (entry_id, dead_letter).
-- `floor` is the least last id that the stream may be left with. An empty dead letter is of an entry that is in the
-- dead letters already, or needs none.
-- Returns how many entries were still there, or -1 without the stream.
local function number(id)
  return tonumber(string.match(id, '^%d+'))
end
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[1])
if groups.err then
  -- Redis was emptied since the caller looked: nothing is in the way any more.
  return string.find(groups.err, 'no such key', 1, true) and -1 or groups
end
local moved = 0
for i = 3, #ARGV, 2 do
  if #redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i]) == 1 then
    moved = moved + 1
    if ARGV[i + 1] ~= '' then
      redis.call('XADD', KEYS[2], '*', 'v', ARGV[1], 'p', ARGV[i + 1])
    end
    redis.call('XDEL', KEYS[1], ARGV[i])
  end
  for _, group in ipairs(groups) do
    -- XINFO answers in a flat list that begins with the group's name. Removed entries must not stay pending.
    redis.call('XACK', KEYS[1], group[2], ARGV[i])
  end
end
-- Trimmed entries were below the rest: the newest entry is the last one, unless there is none.
local last = ARGV[2]
local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if #newest > 0 then
  last = newest[1][1]
end
local added = 0
local info = redis.call('XINFO', 'STREAM', KEYS[1])
for i = 1, #info, 2 do
  if info[i] == 'entries-added' then
    added = info[i + 1]
  end
end
-- Redis 7 remembers the greatest id that was ever removed, and 6.2 knows no such option. Valkey never goes below
-- that id: there the stream is written again, with its groups and what they hold.
local reply = redis.pcall('XSETID', KEYS[1], last, 'ENTRIESADDED', added, 'MAXDELETEDID', last)
if type(reply) == 'table' and reply.err then
  reply = redis.pcall('XSETID', KEYS[1], last)
end
if type(reply) == 'table' and reply.err then
  local entries, held = redis.call('XRANGE', KEYS[1], '-', '+'), {}
  for _, group in ipairs(groups) do
    held[group[2]] = redis.call('XPENDING', KEYS[1], group[2], '-', '+', 1000000)
  end
  redis.call('DEL', KEYS[1])
  -- The only way to a stream without entries, which XSETID and the groups below need.
  redis.call('XGROUP', 'CREATE', KEYS[1], '', '0', 'MKSTREAM')
  redis.call('XGROUP', 'DESTROY', KEYS[1], '')
  for _, entry in ipairs(entries) do
    redis.call('XADD', KEYS[1], entry[1], unpack(entry[2]))
  end
  redis.call('XSETID', KEYS[1], last)
  for _, group in ipairs(groups) do
    redis.call('XGROUP', 'CREATE', KEYS[1], group[2], '0')
    for i = 1, #group, 2 do
      if group[i] == 'last-delivered-id' then
        redis.call('XGROUP', 'SETID', KEYS[1], group[2], group[i + 1])
      end
    end
    for _, one in ipairs(held[group[2]]) do
      -- FORCE, as the new group has delivered nothing. Idle times go on, so no lease starts again.
      redis.call('XCLAIM', KEYS[1], group[2], one[2], 0, one[1],
        'IDLE', one[3], 'RETRYCOUNT', one[4], 'FORCE', 'JUSTID')
    end
  end
end
for _, group in ipairs(groups) do
  for i = 1, #group, 2 do
    -- A group with a position above the last id would never get the run's own entries.
    if group[i] == 'last-delivered-id' and number(group[i + 1]) > number(last) then
      redis.call('XGROUP', 'SETID', KEYS[1], group[2], last)
    end
  end
end
return moved
