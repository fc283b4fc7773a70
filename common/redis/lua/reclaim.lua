-- Take over entries of silent consumers, with the number of times each was delivered. What the caller still works on,
-- because only its renewal was late, is no further delivery: its lease begins again, and its count stays.
-- Atomic against other workers that reclaim: each entry gets one holder, and its count is that of its delivery.
-- KEYS: stream.
-- ARGV: group, consumer, idle_ms, count, look_from, latest_ms, holder, worked_on...
-- Deliveries from the future are looked for from `look_from` on (empty: nowhere). `latest_ms` is the latest plausible
-- time (0: any), and `holder` the only one to take from (empty: any). The caller works on the entries `worked_on`.
-- Returns the server's time, where to look next, then (id, fields, deliveries) for each entry taken; only the time
-- where the server's clock has jumped ahead, which makes held leases look expired.
local WINDOW = 256
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if tonumber(ARGV[6]) > 0 and now > tonumber(ARGV[6]) then
  return {now}
end
local place = ''
if ARGV[5] ~= '' then
  -- A delivery from the future is one from before the clock was set back. It would not expire before the clock has
  -- caught up, so its lease is made to begin now. Where its holder lives, this renews it once.
  local rows = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[5], '+', WINDOW)
  for _, held in ipairs(rows) do
    if held[3] <= 0 then
      redis.call('XCLAIM', KEYS[1], ARGV[1], held[2], 0, held[1], 'JUSTID')
    end
  end
  if #rows == WINDOW then
    place = '(' .. rows[#rows][1]
  end
end
-- The server scans all that the group holds, at some 70 ns an entry. None is found twice: a claim sets its idle time
-- to 0. Both bounds hold for any arguments, NaN included: with an idle time of 0 the loop would find its own claims
-- for ever, and a script that has written cannot be killed.
local idle = math.max(1, tonumber(ARGV[3]) or 1)
local taken, wanted, rows = {}, math.min(1000, tonumber(ARGV[4]) or 0), nil
local holder = ARGV[7] ~= '' and {ARGV[7]} or {}
local worked_on = {}
for i = 8, #ARGV do
  worked_on[ARGV[i]] = true
end
repeat
  rows = redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', idle, '-', '+', wanted - #taken, unpack(holder))
  for _, held in ipairs(rows) do
    local id = held[1]
    -- XPENDING reports the deliveries before this one.
    local is_late = held[2] == ARGV[2] and worked_on[id]
    local count = is_late and held[4] or held[4] + 1
    local entry = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, id, 'RETRYCOUNT', count)[1]
    if entry then
      taken[#taken + 1] = {id, entry[2], count}
    else
      -- The entry was trimmed while it was held. Redis 6.2 would keep it pending for ever.
      redis.call('XACK', KEYS[1], ARGV[1], id)
    end
  end
until #rows == 0 or #taken >= wanted
return {now, place, taken}
